"""One kernel for a target layer's keys or values: strip, product, bias, turn, store.

The plain engine writes the stripped inputs down and reads them back; here a tile of tokens is
loaded from the source's cache, stripped in registers, multiplied on the way and turned before
it is stored. Sums are float32. Two halves of the output's channels are accumulated apart, so
that each RoPE plane (i, i + D/2) lies in one program; other layouts take the plain path.

Needs triton, so import this where there is CUDA, or with TRITON_INTERPRET=1, which runs the
kernel on the CPU to check it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvmap.cache import KVCache
from kvmap.columns import KINDS
from kvmap.geometry import RopeTable
from kvmap.rope import Angles

if TYPE_CHECKING:
    from kvmap.mapping import CacheMap

TOKENS = 64
INPUTS = 32


@triton.jit
def _map_tile(
    entries,  # any of the source's tensors, for its type
    addresses,  # [S] of keys or values [B, H_s, T, D_s] of the chosen source layers
    places,  # [R] input parts: source layer * H_s + head, for each group
    weight,  # [G, R * D_s, q]
    bias,  # [G, q]
    strip_cos,  # [S, B, T, D_s / 2], zeros in front where nothing is turned
    strip_sin,
    turn_cos,  # [B, T, D_t / 2]
    turn_sin,
    out,  # [B, H_t, T, D_t]
    tokens,
    parts,
    batch_stride,
    head_stride,
    token_stride,
    angle_stride,
    out_batch,
    out_head,
    out_token,
    heads_s: tl.constexpr,
    per_group: tl.constexpr,
    size_s: tl.constexpr,
    size_t: tl.constexpr,
    is_key: tl.constexpr,
    batch_size: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    half_t: tl.constexpr,
    widen: tl.constexpr,
):
    """Compute `rows` tokens of one target head."""
    start = tl.program_id(0) * rows
    head = tl.program_id(1)
    batch = tl.program_id(2)
    group = head // per_group
    t = start + tl.arange(0, rows)
    inside = t < tokens
    low = tl.arange(0, half_t)
    width = per_group * size_t
    column = (head % per_group) * size_t + low
    valid = low < size_t // 2
    first = tl.zeros((rows, half_t), dtype=tl.float32)
    second = tl.zeros((rows, half_t), dtype=tl.float32)
    for part in range(parts):
        place = tl.load(places + group * parts + part)
        layer = place // heads_s
        base = tl.load(addresses + layer).to(entries.dtype) + batch * batch_stride
        base += (place % heads_s) * head_stride
        angle = (layer * batch_size + batch) * angle_stride
        for at in range(0, size_s // 2, block):
            d = at + tl.arange(0, block)
            mask = inside[:, None] & (d < size_s // 2)[None, :]
            x = tl.load(base + t[:, None] * token_stride + d[None, :], mask=mask, other=0.0)
            y = tl.load(
                base + t[:, None] * token_stride + (d + size_s // 2)[None, :], mask=mask, other=0.0
            )
            x = x.to(tl.float32)
            y = y.to(tl.float32)
            if is_key:
                where = angle + t[:, None] * (size_s // 2) + d[None, :]
                cos = tl.load(strip_cos + where, mask=mask, other=0.0)
                sin = tl.load(strip_sin + where, mask=mask, other=0.0)
                x, y = x * cos + y * sin, y * cos - x * sin
            row = group * parts * size_s + part * size_s + d
            load = (d < size_s // 2)[:, None] & valid[None, :]
            above = weight + row[:, None] * width + column[None, :]
            below = above + (size_s // 2) * width
            kind = weight.dtype.element_ty
            x = x.to(kind)
            y = y.to(kind)
            right = size_t // 2
            upper_first = tl.load(above, mask=load, other=0.0)
            lower_first = tl.load(below, mask=load, other=0.0)
            upper_second = tl.load(above + right, mask=load, other=0.0)
            lower_second = tl.load(below + right, mask=load, other=0.0)
            if widen:
                x = x.to(tl.float32)
                y = y.to(tl.float32)
                upper_first = upper_first.to(tl.float32)
                lower_first = lower_first.to(tl.float32)
                upper_second = upper_second.to(tl.float32)
                lower_second = lower_second.to(tl.float32)
            first += tl.dot(x, upper_first, input_precision="ieee")
            first += tl.dot(y, lower_first, input_precision="ieee")
            second += tl.dot(x, upper_second, input_precision="ieee")
            second += tl.dot(y, lower_second, input_precision="ieee")
    offset = bias + group * width + column
    first += tl.load(offset, mask=valid, other=0.0).to(tl.float32)[None, :]
    second += tl.load(offset + size_t // 2, mask=valid, other=0.0).to(tl.float32)[None, :]
    mask = inside[:, None] & valid[None, :]
    if is_key:
        where = (batch * tokens + t[:, None]) * (size_t // 2) + low[None, :]
        cos = tl.load(turn_cos + where, mask=mask, other=0.0)
        sin = tl.load(turn_sin + where, mask=mask, other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    place = out + batch * out_batch + head * out_head + t[:, None] * out_token + low[None, :]
    kind = out.dtype.element_ty
    tl.store(place, first.to(kind), mask=mask)
    tl.store(place + size_t // 2, second.to(kind), mask=mask)


def supported(table: RopeTable | None, head_size: int) -> bool:
    """Return whether the kernel turns such keys: all channels by halves, or none."""
    whole = table is None or 2 * len(table.inverse_frequencies) == head_size
    return head_size % 2 == 0 and whole and (table is None or table.layout == "half")


def map_kind(
    entries: tuple[Tensor, ...],
    heads: tuple[tuple[int, ...], ...],
    weight: Tensor,
    bias: Tensor,
    positions: Tensor,
    tables: tuple[tuple[RopeTable | None, ...], RopeTable | None] | None,
    out: Tensor,
) -> Tensor:
    """Write one target layer's keys or values and return them.

    Args:
        entries: Keys or values [B, H_s, T, D_s] of each chosen source layer, as cached, of the
            same strides.
        heads: For each group, the source heads it reads; of every layer, layer by layer.
        weight: [G, S · heads · D_s, q].
        bias: [G, q].
        positions: [B, T].
        tables: Of the source's layers, and of the target's; None for values.
        out: [B, H_t, T, D_t], contiguous in its last dimension; a paged layout has its own
            strides over heads and tokens.
    """
    layers, (batch, heads_s, tokens, size_s) = len(entries), entries[0].shape
    groups = weight.shape[0]
    heads_t, size_t = out.shape[1], out.shape[3]
    places = torch.tensor(
        [[s * heads_s + h for s in range(layers) for h in read] for read in heads],
        dtype=torch.int32,
        device=out.device,
    )
    addresses = torch.tensor([t.data_ptr() for t in entries], dtype=torch.int64, device=out.device)
    strips, turns = _angles(positions, tables, size_s, size_t, layers)
    half = triton.next_power_of_2(max(size_t // 2, 16))
    grid = (triton.cdiv(tokens, TOKENS), heads_t, batch)
    _map_tile[grid](
        entries[0],
        addresses,
        places,
        weight,
        bias,
        *strips,
        *turns,
        out,
        tokens,
        places.shape[1],
        *entries[0].stride()[:3],
        tokens * (size_s // 2),
        *out.stride()[:3],
        heads_s=heads_s,
        per_group=heads_t // groups,
        size_s=size_s,
        size_t=size_t,
        is_key=tables is not None,
        batch_size=batch,
        rows=TOKENS,
        block=min(INPUTS, triton.next_power_of_2(max(size_s // 2, 16))),
        half_t=half,
        # The interpreter multiplies the bits of bf16 numbers as integers.
        widen=not out.is_cuda,
    )
    return out


def _angles(positions: Tensor, tables, size_s: int, size_t: int, layers: int):
    """Return cos and sin to strip with, [S, B, T, D_s/2], and to turn with, [B, T, D_t/2]."""
    if tables is None:
        nothing = torch.zeros(1, device=positions.device)
        return (nothing, nothing), (nothing, nothing)
    angles = Angles(positions)
    strips = [angles.planes(table, size_s // 2, undo=True) for table in tables[0]]
    turns = angles.planes(tables[1], size_t // 2, undo=False)
    return tuple(torch.stack(part) for part in zip(*strips, strict=True)), turns


def usable(cmap: CacheMap) -> bool:
    """Return whether the kernel computes all of a map: plain parts, each kind from its own."""
    options, sides = cmap.options, (cmap.source.geometry, cmap.target.geometry)
    plain = all(layer.of(kind).plain for layer in cmap.layers if layer for kind in KINDS)
    turned = all(supported(table, side.head_size) for side in sides for table in side.rope)
    return plain and turned and not (options.joint or options.anchor or options.exact_layers)


def apply(cmap: CacheMap, cache: KVCache, out: KVCache) -> None:
    """Write the target's cache for the source's into `out`, layer by layer."""
    source, target = cmap.source.geometry, cmap.target.geometry
    read = tuple((head,) for head in cmap.options.assignment)
    heads = read if cmap.options.heads == "matched" else (tuple(range(source.kv_heads)),)
    for index, layer in enumerate(cmap.layers):
        strips = tuple(source.rope[s] for s in layer.source_layers)
        for kind in KINDS:
            side = "keys" if kind == "key" else "values"
            part = layer.of(kind).each(lambda tensor: tensor.to(cache.keys[0].device))
            map_kind(
                tuple(getattr(cache, side)[s] for s in layer.source_layers),
                heads,
                part.weight,
                part.bias,
                cache.positions,
                (strips, target.rope[index]) if kind == "key" else None,
                getattr(out, side)[index],
            )
