"""One chunk of tokens: stripped and laid side by side, multiplied, turned, stored.

Columns [G, B·T, n·H/G·D] of the inputs, or of products, are seen as [n, B, H, T, D], like caches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvmap.affine import Affine
from kvmap.cache import KVCache
from kvmap.columns import KINDS
from kvmap.engine.layout import Ranges
from kvmap.engine.trail import Trail
from kvmap.engine.workspace import Workspace
from kvmap.rope import Angles

if TYPE_CHECKING:
    from kvmap.mapping import CacheMap

FirstLayer = tuple[Tensor, ...]


class Chunk:
    """One chunk of tokens, stripped and laid side by side."""

    def __init__(
        self,
        cmap: CacheMap,
        cache: KVCache,
        first: FirstLayer | None,
        work: Workspace,
        trail: Trail | None,
    ) -> None:
        self.cmap, self.first, self.work = cmap, first, work
        self.shape = tuple(cache.positions.shape)
        rows = self.shape[0] * self.shape[1]
        self.joint = cmap.options.joint
        self.inputs = {kind: buffer.narrow(-2, 0, rows) for kind, buffer in work.inputs.items()}
        products = work.products.narrow(-2, 0, rows)
        size, groups = cmap.target.geometry.head_size, work.layout.groups
        made = products.view(len(products), groups, *self.shape, -1, size)
        made = made.permute(0, 2, 1, 4, 3, 5).flatten(2, 3)
        # Each slot's product, and the same seen as [B, H, T, D].
        self.products, self.made, self.all_made = products.unbind(), made.unbind(), made
        self.angles = Angles(cache.positions[:, None])
        self._lay_source(cache)
        start = work.layout.extra
        if cmap.options.anchor:
            keys = torch.empty_like(first[0], dtype=torch.float32)
            self.angles.undo(first[0], cmap.target.geometry.rope[0], keys)
            self._lay(keys, first[1], start)
            start += work.layout.anchor
        if trail is not None:
            self._lay_trail(trail, start)

    def _assigned(self, tensor: Tensor) -> Tensor:
        """Return the source heads that the target heads read, [B, H, T, D]."""
        assignment = self.cmap.options.assignment
        if self.cmap.options.heads == "all" or assignment == (*range(tensor.shape[1]),):
            return tensor
        return tensor[:, list(assignment)]

    def _seen(self, columns: Tensor, count: int, size: int) -> Tensor:
        """See columns [G, B·T, n·H/G·D] as [n, B, H, T, D]."""
        seen = columns.view(self.work.layout.groups, *self.shape, count, -1, size)
        return seen.permute(3, 1, 0, 4, 2, 5).flatten(2, 3)

    def _lay_source(self, cache: KVCache) -> None:
        """Write content keys and values of the source's layers into X, some layers at a time."""
        layout, source = self.work.layout, self.cmap.source.geometry
        kinds = len(KINDS) if self.joint else 1
        for start, stop in layout.alike:
            for at in range(start, stop, self.work.together):
                layers = layout.places[at : min(at + self.work.together, stop)]
                count = len(layers)
                columns = slice(at * layout.source, (at + count) * layout.source)
                keys, values = (
                    self._seen(self.inputs[kind][..., columns], count * kinds, source.head_size)
                    for kind in KINDS
                )
                read = [self._assigned(cache.keys[layer]) for layer in layers]
                stacked = torch.stack(read) if count > 1 else read[0][None]
                self.angles.undo(stacked, source.rope[layers[0]], keys[::kinds])
                read = [self._assigned(cache.values[layer]) for layer in layers]
                torch.stack(read, out=values[kinds - 1 :: kinds])

    def _lay_trail(self, trail: Trail, start: int) -> None:
        """Write what is read of the tokens before into every X, token by token, by layer."""
        width, layers = self.work.layout.back, len(trail.layers)
        for at, pair in enumerate(trail.content(self.cmap.source.geometry)):
            read = tuple(map(self._assigned, pair))
            for tokens in range(1, trail.lookback + 1):
                place = start + ((tokens - 1) * layers + at) * width
                self._lay(*(trail.late(tensor, tokens) for tensor in read), place)

    def _lay(self, keys: Tensor, values: Tensor, start: int) -> None:
        """Write content keys and values [B, H, T, D] beside each other into every X."""
        width = 2 * keys.shape[1] * keys.shape[3] // self.work.layout.groups
        for buffer in {id(buffer): buffer for buffer in self.inputs.values()}.values():
            places = self._seen(buffer[..., start : start + width], 2, keys.shape[3])
            places[0].copy_(keys)
            places[1].copy_(values)

    def write(self, out: KVCache) -> None:
        """Write all target layers of the chunk, some at a time."""
        for start, stop in self.work.layout.alike_targets:
            for at in range(start, stop, self.work.together):
                self._write_some(range(at, min(at + self.work.together, stop)), out)

    def _write_some(self, indices: range, out: KVCache) -> None:
        """Write some target layers that turn alike, mapped ones or one that is exact."""
        for slot, index in enumerate(indices):
            layer = self.cmap.layers[index]
            if layer is None:
                out.store_layer(index, *self.first[2 * index : 2 * index + 2])
                return
            reads = self.work.layout.reads[index]
            x = self._gather("value", reads)
            hidden = self._multiply(layer.value, x, slot)
            out.values[index].copy_(self.made[slot])
            x = x if self.joint else self._gather("key", reads)
            self._multiply(layer.key, x, slot, hidden if self.joint and layer.shared else None)
        table, count = self.cmap.target.geometry.rope[indices[0]], len(indices)
        if count == 1:
            self.angles.turn(self.made[0], table, out.keys[indices[0]])
            return
        content = self.all_made[:count]
        turned = torch.empty(content.shape, device=content.device)
        for index, keys in zip(indices, self.angles.turn(content, table, turned), strict=True):
            out.keys[index].copy_(keys)

    def _gather(self, kind: str, reads: Ranges) -> Tensor:
        """Return a target layer's inputs [G, B·T, p]."""
        parts = [self.inputs[kind].narrow(-1, start, stop - start) for start, stop in reads]
        if len(parts) == 1:
            return parts[0]
        width = sum(part.shape[-1] for part in parts)
        place = self.work.gathered[..., : parts[0].shape[-2], :width]
        return torch.cat(parts, dim=-1, out=place)

    def _multiply(
        self, part: Affine, x: Tensor, slot: int, hidden: Tensor | None = None
    ) -> Tensor | None:
        """Write X·W + b, or what else the part computes.

        Args:
            hidden: X times the first of two factors, where it is known.

        Returns:
            The same, [G, B·T, r]; None for a part of one factor.
        """
        here, made = part, self.products[slot]
        if (part.weight.device, part.weight.dtype) != (x.device, x.dtype):
            here = part.each(lambda tensor: tensor.to(x.device, x.dtype, non_blocking=True))
        bias, *factors = here.operands
        one = bias.dim() == 1
        if len(factors) == 2 and hidden is None:
            place = self.work.hidden[..., : x.shape[-2], : factors[0].shape[-1]]
            hidden = torch.matmul(x, factors[0], out=place)
        # One group by itself: what multiplies batches takes longer for a batch of one.
        multiply = torch.addmm if one else torch.baddbmm
        multiply(bias, x if hidden is None else hidden, factors[-1], out=made)
        if here.network:
            made += here.bent(x).view(made.shape)
        return hidden
