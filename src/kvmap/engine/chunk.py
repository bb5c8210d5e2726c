"""One chunk of tokens: stripped and laid side by side, multiplied, turned, stored.

Here every cache tensor [B, H, T, D] is seen as [G, B, T, H/G, D].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvmap.affine import Affine
from kvmap.cache import KVCache
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
        self.matched = cmap.options.heads == "matched"
        self.angles = Angles(cache.positions[None, :, :, None])
        tables = cmap.source.geometry.rope
        for place, layer in enumerate(work.layout.places):
            pair = self._assigned(cache.keys[layer]), self._assigned(cache.values[layer])
            self._lay(pair, place * work.layout.source, tables[layer], both=cmap.options.joint)
        start = work.layout.extra
        if cmap.options.anchor:
            self._lay(first[:2], start, cmap.target.geometry.rope[0], both=True)
        own, start = self.angles, start + work.layout.anchor
        for tokens in range(1, cmap.options.lookback + 1):
            pair, positions = trail.late(tokens)
            self.angles = Angles(positions[None, :, :, None])
            self._lay(tuple(map(self._assigned, pair)), start, tables[0], both=True)
            start += work.layout.back
        self.angles = own

    def _assigned(self, tensor: Tensor) -> Tensor:
        """Return the source heads that the target heads read, [B, G, T, D]."""
        assignment = self.cmap.options.assignment
        if not self.matched or assignment == tuple(range(tensor.shape[1])):
            return tensor
        return tensor[:, list(assignment)]

    def _grouped(self, tensor: Tensor) -> Tensor:
        """See [B, H, T, D] as [G, B, T, H/G, D]."""
        if self.matched:
            return tensor.transpose(0, 1)[:, :, :, None]
        return tensor.transpose(1, 2)[None]

    def _rows(self, buffer: Tensor, columns: slice, heads: int) -> Tensor:
        """See columns of a buffer's first rows as [G, B, T, heads, D]."""
        rows = buffer[:, : self.shape[0] * self.shape[1], columns]
        return rows.view(rows.shape[0], *self.shape, heads, rows.shape[2] // heads)

    def _lay(self, pair: tuple[Tensor, Tensor], start: int, table, both: bool) -> None:
        """Write one layer's content keys and values into X.

        Args:
            both: They stand side by side in every X, else each in its own.
        """
        keys, values = (self._grouped(tensor) for tensor in pair)
        width = keys.shape[3] * keys.shape[4]
        inputs = self.work.inputs
        for buffer in {id(buffer): buffer for buffer in inputs.values()}.values():
            if both or buffer is inputs["key"]:
                place = self._rows(buffer, slice(start, start + width), keys.shape[3])
                self.angles.undo(keys, table, place)
            if both or buffer is inputs["value"]:
                at = start + width if both else start
                self._rows(buffer, slice(at, at + width), keys.shape[3]).copy_(values)

    def write(self, out: KVCache) -> None:
        """Write all target layers of the chunk."""
        tables = self.cmap.target.geometry.rope
        for index, layer in enumerate(self.cmap.layers):
            keys, values = out.keys[index], out.values[index]
            if layer is None:
                keys.copy_(self.first[2 * index])
                values.copy_(self.first[2 * index + 1])
                continue
            segments = self.work.layout.segments(layer.source_layers)
            layer = layer.each(lambda _, part: self._here(part))
            x = self._gather("key", segments)
            hidden = self._hidden(layer.key, x)
            made = self._product(layer.key, x, hidden)
            self.angles.turn(made, tables[index], self._grouped(keys))
            x = x if self.cmap.options.joint else self._gather("value", segments)
            if not (self.cmap.options.joint and layer.shared):
                hidden = self._hidden(layer.value, x)
            self._grouped(values).copy_(self._product(layer.value, x, hidden))

    def _here(self, part: Affine) -> Affine:
        """Return a part in the device and dtype of the products."""
        like = self.work.products
        if (part.weight.device, part.weight.dtype) == (like.device, like.dtype):
            return part
        return part.each(lambda tensor: tensor.to(like.device, like.dtype, non_blocking=True))

    def _gather(self, kind: str, segments: list[tuple[int, int]]) -> Tensor:
        """Return a target layer's inputs [G, B·T, p]."""
        inputs = self.work.inputs[kind][:, : self.shape[0] * self.shape[1]]
        parts = [inputs[..., start:stop] for start, stop in segments]
        if len(parts) == 1:
            return parts[0]
        width = sum(part.shape[-1] for part in parts)
        place = self.work.gathered[:, : inputs.shape[1], :width]
        return torch.cat(parts, dim=-1, out=place)

    def _hidden(self, part: Affine, x: Tensor) -> Tensor | None:
        """Return X times the first of two factors [G, B·T, r]; None for a part of one."""
        if part.up is None:
            return None
        place = self.work.hidden[:, : x.shape[1], : part.weight.shape[2]]
        return torch.bmm(x, part.weight, out=place)

    def _product(self, part: Affine, x: Tensor, hidden: Tensor | None) -> Tensor:
        """Return X·W + b, or what else the part computes, as [G, B, T, H/G, D]."""
        made = self.work.products[:, : x.shape[1]]
        left, right = (x, part.weight) if hidden is None else (hidden, part.up)
        torch.baddbmm(part.bias[:, None], left, right, out=made)
        if part.network:
            made += part.bent(x)
        heads = self.cmap.target.geometry.kv_heads // self.work.layout.groups
        return self._rows(self.work.products, slice(None), heads)
