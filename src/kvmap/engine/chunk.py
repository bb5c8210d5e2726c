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
from kvmap.rope import Angles, strip

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
        self.inputs = {kind: buffer[:, :rows] for kind, buffer in work.inputs.items()}
        self.products = work.products[:, :rows]
        self.angles = Angles(cache.positions[:, None])
        self._lay_source(cache)
        start = work.layout.extra
        if cmap.options.anchor:
            keys = torch.empty_like(first[0], dtype=torch.float32)
            self.angles.undo(first[0], cmap.target.geometry.rope[0], keys)
            self._lay(keys, first[1], start)
            start += work.layout.anchor
        if trail is not None:
            content = strip(trail.keys, trail.positions, cmap.source.geometry.rope[0])
            content, values = (self._assigned(tensor) for tensor in (content, trail.values))
            for tokens in range(1, trail.lookback + 1):
                self._lay(trail.late(content, tokens), trail.late(values, tokens), start)
                start += work.layout.back

    def _assigned(self, tensor: Tensor) -> Tensor:
        """Return the source heads that the target heads read, [B, H, T, D]."""
        assignment = self.cmap.options.assignment
        if self.cmap.options.heads == "all" or assignment == (*range(tensor.shape[1]),):
            return tensor
        return tensor[:, list(assignment)]

    def _seen(self, columns: Tensor, count: int, size: int) -> Tensor:
        """See columns [G, B·T, n·H/G·D] as [n, B, H, T, D]."""
        seen = columns.view(columns.shape[0], *self.shape, count, -1, size)
        return seen.permute(3, 1, 0, 4, 2, 5).flatten(2, 3)

    def _lay_source(self, cache: KVCache) -> None:
        """Write content keys and values of the source's layers into X, some layers at a time."""
        layout, source = self.work.layout, self.cmap.source.geometry
        kinds = len(KINDS) if self.cmap.options.joint else 1
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
                for layer, place in zip(layers, values[kinds - 1 :: kinds], strict=True):
                    place.copy_(self._assigned(cache.values[layer]))

    def _lay(self, keys: Tensor, values: Tensor, start: int) -> None:
        """Write content keys and values [B, H, T, D] beside each other into every X."""
        width = 2 * keys.shape[1] * keys.shape[3] // self.work.layout.groups
        for buffer in {id(buffer): buffer for buffer in self.inputs.values()}.values():
            places = self._seen(buffer[..., start : start + width], 2, keys.shape[3])
            places[0].copy_(keys)
            places[1].copy_(values)

    def write(self, out: KVCache) -> None:
        """Write all target layers of the chunk."""
        tables, joint = self.cmap.target.geometry.rope, self.cmap.options.joint
        for index, layer in enumerate(self.cmap.layers):
            keys, values = out.keys[index], out.values[index]
            if layer is None:
                keys.copy_(self.first[2 * index])
                values.copy_(self.first[2 * index + 1])
                continue
            reads = self.work.layout.reads[index]
            x = self._gather("key", reads)
            self.angles.turn(self._product(layer.key, x), tables[index], keys)
            x = x if joint else self._gather("value", reads)
            values.copy_(self._product(layer.value, x))

    def _gather(self, kind: str, reads: Ranges) -> Tensor:
        """Return a target layer's inputs [G, B·T, p]."""
        parts = [self.inputs[kind][..., start:stop] for start, stop in reads]
        if len(parts) == 1:
            return parts[0]
        width = sum(part.shape[-1] for part in parts)
        place = self.work.gathered[:, : self.products.shape[1], :width]
        return torch.cat(parts, dim=-1, out=place)

    def _product(self, affine: Affine, x: Tensor) -> Tensor:
        """Return X·W + b, or what else the part computes, as [B, H, T, D]."""
        here, made = affine, self.products
        if (affine.weight.device, affine.weight.dtype) != (x.device, x.dtype):
            here = affine.each(lambda tensor: tensor.to(x.device, x.dtype, non_blocking=True))
        if not here.plain:
            made.copy_(here(x))
        elif len(x) == 1:
            torch.addmm(here.bias[0], x[0], here.weight[0], out=made[0])
        else:
            torch.baddbmm(here.bias[:, None], x, here.weight, out=made)
        return self._seen(made, 1, self.cmap.target.geometry.head_size)[0]
