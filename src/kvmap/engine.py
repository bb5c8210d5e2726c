"""Apply a map: strip, lay side by side, one product per target layer and kind, turn, store.

A chunk of tokens is stripped once, every source layer that any target layer reads, into
X [G, B·T, C]: G groups of heads that share a regression (all heads together, or one target
head each); columns by source layer, keys beside values where they are joint, the target's own
first layer last. A target layer's inputs are columns of X: a view where they lie together,
else gathered into one reused buffer. Its keys are X·W + b turned to their positions, its
values X·W + b, both written into the cache they are for. The chunk is as long as a fixed
number of extra bytes allows, so memory beside the two caches does not grow with T.

Here every cache tensor [B, H, T, D] is seen as [G, B, T, H/G, D].
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvmap.cache import KVCache
from kvmap.columns import KINDS
from kvmap.geometry import Geometry
from kvmap.rope import Angles

if TYPE_CHECKING:
    from kvmap.mapping import Affine, CacheMap, FirstLayer

# What mapping may hold beside the two caches, and the bounds of the chunk that follows.
EXTRA_BYTES = {"cpu": 96 << 20, "cuda": 1 << 30}
LEAST_TOKENS, MOST_TOKENS = 64, 4096


def allocate(geometry: Geometry, like: KVCache, dtype: torch.dtype | None = None) -> KVCache:
    """Return a target's cache to be filled, for the tokens and on the device of another cache.

    Args:
        dtype: That of the other cache if not given.
    """
    one = like.keys[0]
    made = empty_cache(geometry, like.positions.to(one.device), dtype or one.dtype)
    return replace(made, token_ids=like.token_ids, mask=like.mask)


def empty_cache(geometry: Geometry, positions: Tensor, dtype: torch.dtype) -> KVCache:
    """Return a cache to be filled for positions [B, T]; the memory is not yet written."""
    batch, tokens = positions.shape
    shape = (batch, geometry.kv_heads, tokens, geometry.head_size)
    empty = lambda: torch.empty(shape, dtype=dtype, device=positions.device)  # noqa: E731
    keys, values = (tuple(empty() for _ in range(geometry.layers)) for _ in KINDS)
    return KVCache(keys, values, positions)


def apply(
    cmap: CacheMap,
    cache: KVCache,
    first: FirstLayer | None,
    out: KVCache,
    before: FirstLayer | None = None,
) -> None:
    """Write the target's cache for the source's into `out`.

    Args:
        cache: The source's; keys rotated, [B, H_s, T, D_s].
        first: Keys and values of the target's own lowest layers, where the map reads them.
        out: [B, H_t, T, D_t] per layer; views of a larger cache will do.
        before: Layer 0's rotated key and value of the token before the first, where there is one.
    """
    if _kernel_wanted(cache):
        from kvmap import triton_map

        if triton_map.usable(cmap):
            triton_map.apply(cmap, cache, out)
            return
    work = _Workspace.of(cmap, cache)
    for start in range(0, cache.tokens, work.chunk):
        stop = min(start + work.chunk, cache.tokens)
        part = None if first is None else tuple(tensor[:, :, start:stop] for tensor in first)
        if start and first is not None:
            before = tuple(tensor[:, :, start - 1 : start] for tensor in first[:2])
        # Where the token before stands; ahead of the context, one place ahead.
        ahead = cache.positions[:, start - 1 : start] if start else cache.positions[:, :1] - 1
        chunk = _Chunk(cmap, cache.slice(start, stop), part, work, _Before(before, ahead))
        chunk.write(out.slice(start, stop))


def _kernel_wanted(cache: KVCache) -> bool:
    """Return whether the fused kernel is asked for, where it can run.

    It is not the default: it has been checked, but not yet measured on a GPU.
    """
    able = cache.keys[0].is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return able and os.environ.get("KVMAP_TRITON") == "1"


def prepare(cmap: CacheMap, device: torch.device | str) -> CacheMap:
    """Return the map with its weights on a device, in the dtype it computes in there.

    `apply` sees to that layer by layer as it goes; a map that is applied often gains from
    having it done once.
    """
    return cmap.to(device, compute_dtype(_weight_dtype(cmap), torch.device(device).type))


def _weight_dtype(cmap: CacheMap) -> torch.dtype:
    return next((layer.key.weight.dtype for layer in cmap.layers if layer), torch.float32)


@lru_cache(maxsize=16)
def compute_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """Return the dtype to multiply in: fp32 where a CPU only emulates the weights' own."""
    if dtype == torch.float32 or device != "cpu":
        return dtype
    seconds = {}
    for candidate in (dtype, torch.float32):
        square = torch.ones(128, 128, dtype=candidate)
        square @ square
        started = time.perf_counter()
        square @ square
        seconds[candidate] = time.perf_counter() - started
    return min(seconds, key=seconds.get)


@dataclass(frozen=True)
class _Layout:
    """Where a map's inputs stand in X.

    Attributes:
        groups: G.
        source: Columns of one source layer.
        anchor: Columns of the target's own first layer, of the token and the one before.
        outputs: Columns q of one target layer's keys, or values.
        places: Source layers in the order of their columns.
    """

    groups: int
    source: int
    anchor: int
    outputs: int
    places: tuple[int, ...]

    @classmethod
    def of(cls, cmap: CacheMap) -> _Layout:
        source, target = cmap.source.geometry, cmap.target.geometry
        matched = cmap.options.heads == "matched"
        groups = target.kv_heads if matched else 1
        width = source.head_size if matched else source.width
        outputs = target.width // groups
        return cls(
            groups,
            width * (2 if cmap.options.joint else 1),
            2 * outputs * cmap.options.anchors,
            outputs,
            cmap.source_layers,
        )

    @property
    def columns(self) -> int:
        """C."""
        return len(self.places) * self.source + self.anchor

    def segments(self, source_layers: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return the ranges of columns that a target layer reads, neighbours merged."""
        starts = [self.places.index(layer) * self.source for layer in source_layers]
        ranges = [(start, start + self.source) for start in starts]
        if self.anchor:
            ranges.append((self.columns - self.anchor, self.columns))
        merged = ranges[:1]
        for start, stop in ranges[1:]:
            if merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        return merged


@dataclass(frozen=True)
class _Workspace:
    """What one call of `apply` holds beside the two caches, and the map it is for.

    Attributes:
        chunk: Tokens mapped at a time.
        inputs: X [G, B·chunk, C] by kind; the same one for both where they are joint.
        gathered: [G, B·chunk, p].
        products: [G, B·chunk, q].
    """

    layout: _Layout
    chunk: int
    inputs: dict[str, Tensor]
    gathered: Tensor
    products: Tensor

    @classmethod
    def of(cls, cmap: CacheMap, cache: KVCache) -> _Workspace:
        layout, device = _Layout.of(cmap), cache.keys[0].device
        dtype = compute_dtype(_weight_dtype(cmap), device.type)
        copies = 1 if cmap.options.joint else 2
        scattered = [
            layer.key.weight.shape[1]
            for layer in cmap.layers
            if layer and len(layout.segments(layer.source_layers)) > 1
        ]
        widths = (*[layout.columns] * copies, max(scattered, default=0), layout.outputs)
        chunk = _chunk_tokens(cmap, cache, layout.groups * sum(widths) * dtype.itemsize)
        rows = cache.positions.shape[0] * chunk
        *inputs, gathered, products = (
            torch.empty(layout.groups, rows, width, dtype=dtype, device=device) for width in widths
        )
        by_kind = dict(zip(KINDS, inputs * (3 - copies), strict=True))
        return cls(layout, chunk, by_kind, gathered, products)


def _chunk_tokens(cmap: CacheMap, cache: KVCache, held: int) -> int:
    """Return how many tokens are mapped at a time.

    Args:
        held: Bytes that one token of one sequence takes in the workspace.
    """
    # Beside the workspace, one layer passes in fp32, with temporaries of its own size.
    passing = 4 * 4 * max(cmap.source.geometry.width, cmap.target.geometry.width)
    each = (held + passing) * cache.positions.shape[0]
    fits = EXTRA_BYTES.get(cache.keys[0].device.type, EXTRA_BYTES["cpu"]) // each
    return min(cache.tokens, max(LEAST_TOKENS, min(fits, MOST_TOKENS)))


@dataclass(frozen=True)
class _Before:
    """The token before a chunk: its layer 0 [B, H_t, 1, D_t], where there is one, and position."""

    entries: FirstLayer | None
    position: Tensor

    def shifted(self, first: FirstLayer) -> FirstLayer:
        """Return layer 0 one token late: what stands before comes in front, the last drops out."""
        lead = self.entries or tuple(torch.zeros_like(tensor[:, :, :1]) for tensor in first[:2])
        return tuple(
            torch.cat((one.to(tensor), tensor[:, :, :-1]), dim=2)
            for one, tensor in zip(lead, first[:2], strict=True)
        )

    def angles(self, positions: Tensor) -> Angles:
        """Return the angles of the shifted layer's positions."""
        late = torch.cat((self.position, positions[:, :-1]), dim=1)
        return Angles(late[None, :, :, None])


class _Chunk:
    """One chunk of tokens, stripped and laid side by side."""

    def __init__(
        self,
        cmap: CacheMap,
        cache: KVCache,
        first: FirstLayer | None,
        work: _Workspace,
        before: _Before,
    ) -> None:
        self.cmap, self.first, self.work = cmap, first, work
        self.shape = tuple(cache.positions.shape)
        self.matched = cmap.options.heads == "matched"
        self.angles = Angles(cache.positions[None, :, :, None])
        tables = cmap.source.geometry.rope
        for place, layer in enumerate(work.layout.places):
            pair = self._assigned(cache.keys[layer]), self._assigned(cache.values[layer])
            self._lay(pair, place * work.layout.source, tables[layer], both=cmap.options.joint)
        if cmap.options.anchor:
            start = work.layout.columns - work.layout.anchor
            self._lay(first[:2], start, cmap.target.geometry.rope[0], both=True)
        if cmap.options.anchors > 1:
            start += work.layout.anchor // 2
            own, self.angles = self.angles, before.angles(cache.positions)
            self._lay(before.shifted(first), start, cmap.target.geometry.rope[0], both=True)
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
            x = self._gather("key", segments)
            self.angles.turn(self._product(layer.key, x), tables[index], self._grouped(keys))
            x = x if self.cmap.options.joint else self._gather("value", segments)
            self._grouped(values).copy_(self._product(layer.value, x))

    def _gather(self, kind: str, segments: list[tuple[int, int]]) -> Tensor:
        """Return a target layer's inputs [G, B·T, p]."""
        inputs = self.work.inputs[kind][:, : self.shape[0] * self.shape[1]]
        parts = [inputs[..., start:stop] for start, stop in segments]
        if len(parts) == 1:
            return parts[0]
        width = sum(part.shape[-1] for part in parts)
        place = self.work.gathered[:, : inputs.shape[1], :width]
        return torch.cat(parts, dim=-1, out=place)

    def _product(self, affine: Affine, x: Tensor) -> Tensor:
        """Return X·W + b, or what else the part computes, as [G, B, T, H/G, D]."""
        here = affine
        if (affine.weight.device, affine.weight.dtype) != (x.device, x.dtype):
            here = affine.each(lambda tensor: tensor.to(x.device, x.dtype, non_blocking=True))
        made = self.work.products[:, : x.shape[1]]
        if here.plain:
            torch.baddbmm(here.bias[:, None], x, here.weight, out=made)
        else:
            made.copy_(here(x))
        heads = self.cmap.target.geometry.kv_heads // self.work.layout.groups
        return self._rows(self.work.products, slice(None), heads)
