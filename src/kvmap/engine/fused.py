"""Feed the fused kernel: which inputs it reads, where they lie, and by which angles they turn.

Needs triton, so import this where there is CUDA, or with TRITON_INTERPRET=1, which runs the
kernel on the CPU to check it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from kvmap.affine import Affine
from kvmap.cache import KVCache
from kvmap.columns import BACK, KINDS, Block, head_sizes
from kvmap.engine.chunk import FirstLayer
from kvmap.engine.kernel import map_tile
from kvmap.engine.paged import PagedCache
from kvmap.engine.precision import compute_dtype, weight_dtype
from kvmap.engine.trail import Trail
from kvmap.geometry import RopeTable
from kvmap.map_options import input_blocks
from kvmap.rope import Angles

if TYPE_CHECKING:
    from kvmap.mapping import CacheMap

# Tokens mapped at a time: bounds the tables of angles and the layers that are shifted.
CHUNK_TOKENS = 16384


@dataclass(frozen=True)
class Tile:
    """What one program computes at a time.

    Attributes:
        rows: Tokens.
        planes: Of the inputs, multiplied at a time; at least 16.
        warps: Of 32 threads.
        stages: Loads in flight.
    """

    rows: int = 128
    planes: int = 32
    warps: int = 8
    stages: int = 3

    @classmethod
    def of(cls, head_size: int, itemsize: int) -> Tile:
        """Return what fits the shared memory of a small GPU; not tuned on any."""
        rows = 128 if head_size <= 128 else 64
        return cls(rows, planes=64 // max(itemsize, 2), warps=rows // 16)


def usable(
    cmap: CacheMap, cache: KVCache, first: FirstLayer | None, out: KVCache | PagedCache
) -> bool:
    """Return whether the kernel computes all of a map, from caches of one dtype on one device."""
    sides = (cmap.source.geometry, cmap.target.geometry)
    plain = all(layer.of(kind).plain for layer in cmap.layers if layer for kind in KINDS)
    turned = all(_supported(table, side.head_size) for side in sides for table in side.rope)
    read = (*cache.keys, *cache.values, *(first or ()))
    written = (*out.keys, *out.values)
    alike = len({tensor.dtype for tensor in read}) == 1
    here = len({tensor.device for tensor in (*read, *written)}) == 1
    rows = all(tensor.stride(-1) == 1 for tensor in (*read, *written))
    return plain and turned and alike and here and rows


def _supported(table: RopeTable | None, head_size: int) -> bool:
    """Return whether the kernel turns such keys: all channels by halves, or none."""
    whole = table is None or 2 * len(table.inverse_frequencies) == head_size
    return head_size % 2 == 0 and whole and (table is None or table.layout == "half")


@dataclass(frozen=True)
class FusedPlan:
    """What all chunks of one call share.

    Attributes:
        chunk: Tokens mapped at a time.
        rows: Place of each tensor in the kernel's table, by (side, kind, layer).
        steps: [L, 2, G, R, 4] of the layers that are mapped, on the device.
        counts: Of the R steps, how many each of these layers takes.
        dtype: That of the products.
    """

    chunk: int
    tile: Tile
    rows: dict[tuple[str, str, int], int]
    steps: Tensor
    counts: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, cmap: CacheMap, cache: KVCache) -> FusedPlan:
        """Lay out the inputs of a map."""
        device = cache.keys[0].device
        dtype = compute_dtype(weight_dtype(cmap), device.type)
        tile = Tile.of(cmap.target.geometry.head_size, dtype.itemsize)
        layers = [("source", kind, s) for s in cmap.source_layers for kind in KINDS]
        options = cmap.options
        read = [("target", 0)] * options.anchor
        read += [(side, s) for side in BACK[: options.lookback] for s in options.lookback_layers]
        layers += [(side, kind, at) for side, at in read for kind in KINDS]
        rows = {name: at for at, name in enumerate(layers)}
        table = _steps(cmap, rows, tile.planes)
        counts = tuple(len(kinds[0][0]) for kinds in table)
        pad = lambda steps: steps + [(0,) * 4] * (max(counts) - len(steps))  # noqa: E731
        padded = [[[pad(steps) for steps in groups] for groups in kinds] for kinds in table]
        steps = torch.tensor(padded, dtype=torch.int32).to(device)
        return cls(min(CHUNK_TOKENS, cache.tokens), tile, rows, steps, counts, dtype)


Steps = list[tuple[int, int, int, int]]


def _steps(
    cmap: CacheMap, rows: dict[tuple[str, str, int], int], planes: int
) -> list[list[list[Steps]]]:
    """Return tensor, head, first plane and row of the weight of every step.

    By mapped layer, kind, group of heads, in the order of the weight's rows.
    """
    options, source, target = cmap.options, cmap.source.geometry, cmap.target.geometry
    heads = (source.kv_heads, target.kv_heads)
    groups = [None] if options.heads == "all" else list(range(target.kv_heads))
    sizes = head_sizes(source, target)

    def of(blocks: list[Block]) -> Steps:
        found, row = [], 0
        for block in blocks:
            tensor, size = rows[block.side, block.kind, block.layer], sizes[block.side]
            found += [(tensor, block.head, at, row) for at in range(0, size // 2, planes)]
            row += size
        return found

    return [
        [
            [of(input_blocks(options, layer.source_layers, kind, group, heads)) for group in groups]
            for kind in KINDS
        ]
        for layer in cmap.layers
        if layer
    ]


class _AngleTable:
    """Cos and sin of all that a chunk turns, one table [B, T, D/2] after the other, each once."""

    def __init__(self) -> None:
        self.starts: dict[tuple[int, RopeTable, bool], int] = {}
        self.parts: list[tuple[Tensor, Tensor]] = []
        self.size = 0

    def add(self, angles: Angles, table: RopeTable | None, undo: bool) -> int:
        """Return where a table's angles begin; -1 where nothing turns."""
        if table is None:
            return -1
        key = (id(angles), table, undo)
        if key not in self.starts:
            self.starts[key] = self.size
            self.parts.append(angles.planes(table, undo))
            self.size += self.parts[-1][0].numel()
        return self.starts[key]

    def joined(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return all cos and all sin."""
        if not self.parts:
            return (torch.zeros(1, device=device),) * 2
        cos, sin = zip(*self.parts, strict=True)
        return torch.cat([p.flatten() for p in cos]), torch.cat([p.flatten() for p in sin])


class FusedChunk:
    """One chunk of tokens whose target layers are computed from the caches as they are."""

    def __init__(
        self,
        cmap: CacheMap,
        cache: KVCache,
        first: FirstLayer | None,
        work: FusedPlan,
        trail: Trail | None,
    ) -> None:
        self.cmap, self.first, self.work = cmap, first, work
        self.shape = tuple(cache.positions.shape)
        source, target = cmap.source.geometry, cmap.target.geometry
        own, table = Angles(cache.positions), _AngleTable()
        self.inputs, angles = [], []
        for s in cmap.source_layers:
            self.inputs += [cache.keys[s], cache.values[s]]
            angles += [table.add(own, source.rope[s], undo=True), -1]
        if cmap.options.anchor:
            self.inputs += first[:2]
            angles += [table.add(own, target.rope[0], undo=True), -1]
        self.late = []  # kept: the table knows angles by identity
        entries = list(trail.entries()) if trail is not None else []
        for tokens in range(1, cmap.options.lookback + 1):
            self.late.append(Angles(trail.late(trail.positions, tokens)))
            for s, pair in zip(trail.layers, entries, strict=True):
                self.inputs += [trail.late(tensor, tokens) for tensor in pair]
                angles += [table.add(self.late[-1], source.rope[s], undo=True), -1]
        self.turns = [table.add(own, rope, undo=False) for rope in target.rope]
        self.strips = max(angles) >= 0
        device = cache.positions.device
        self.cos, self.sin = table.joined(device)
        lines = [
            (tensor.data_ptr(), *tensor.stride()[:3], tensor.shape[3], angle)
            for tensor, angle in zip(self.inputs, angles, strict=True)
        ]
        self.tensors = torch.tensor(lines, dtype=torch.int64).to(device)
        self.aligned = all(_aligned(tensor) for tensor in self.inputs)

    def write(self, out: KVCache | PagedCache) -> None:
        """Write all target layers of the chunk."""
        mapped, slots = 0, None
        if isinstance(out, PagedCache):
            slots = out.slots.to(out.keys[0].device).contiguous()
        for index, layer in enumerate(self.cmap.layers):
            pair = (out.keys[index], out.values[index])
            if layer is None:
                out.store_layer(index, *self.first[2 * index : 2 * index + 2])
                continue
            turns = (self.turns[index], -1)
            for at, kind in enumerate(KINDS):
                self._launch((mapped, at), layer.of(kind), turns[at], pair[at], slots)
            mapped += 1

    def _launch(
        self, place: tuple[int, int], affine: Affine, turn: int, out: Tensor, slots: Tensor | None
    ) -> None:
        """Write one target layer's keys or values [B, H_t, T, D_t], or in blocks."""
        steps, tile = self.work.steps[place], self.work.tile
        (batch, tokens), (_, heads, block, size) = self.shape, out.shape
        weight, bias = (
            tensor.to(out.device, self.work.dtype).contiguous()
            for tensor in (affine.weight, affine.bias)
        )
        groups, p, _ = weight.shape
        half = triton.next_power_of_2(max(size // 2, 16))
        map_tile[(triton.cdiv(tokens, tile.rows), heads, batch)](
            self.inputs[0],
            self.tensors,
            steps,
            weight,
            bias,
            self.cos,
            self.sin,
            turn,
            out,
            self.tensors if slots is None else slots,
            block,
            tokens,
            self.work.counts[place[0]],
            steps.shape[1],
            p,
            *out.stride()[:3],
            per_group=heads // groups,
            size=size,
            strips=self.strips,
            turns=turn >= 0,
            rows=tile.rows,
            planes=tile.planes,
            half=half,
            aligned=self.aligned,
            paged=slots is not None,
            # The interpreter multiplies the bits of bf16 numbers as integers.
            widen=not out.is_cuda,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def _aligned(tensor: Tensor) -> bool:
    """Return whether every row of a tensor starts at a multiple of 16 bytes, and ends at one."""
    each = 16 // tensor.element_size()
    sizes = (*tensor.stride()[:3], tensor.shape[3] // 2)
    return tensor.data_ptr() % 16 == 0 and not any(size % max(each, 8) for size in sizes)
