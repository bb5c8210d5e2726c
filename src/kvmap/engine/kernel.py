"""The kernel of the fused path: strip, product, bias, turn, store, for one target head.

A tile of tokens is loaded from the caches, stripped in registers, multiplied on the way and
turned before it is stored. Sums are float32. Two halves of the output's channels are
accumulated apart, so that each RoPE plane (i, i + D/2) lies in one program.

An input is D channels of one head of one tensor, taken a step of planes at a time. Which
inputs a group of heads reads stands in a table, where each tensor lies in another: so source
layers, the target's own first layer, keys and values may stand side by side in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def map_tile(
    entries,  # any of the inputs' tensors, for its type
    tensors,  # [N, 6] int64: address, strides over batch, head and token, D, where its angles are
    steps,  # [G, R, 4] int32: tensor, head, first plane, row of the weight
    weight,  # [G, p, q]
    bias,  # [G, q]
    cos,  # of every table of angles [B, T, D / 2], one after the other
    sin,
    turn,  # where the output's own angles begin
    out,  # [B, H_t, T, D_t], or in blocks of N tokens [blocks, H_t, N, D_t]
    slots,  # [B, T] int64, block times N and place in it, below 0 for none; where there are blocks
    block,  # N
    tokens,
    count,  # steps to take, of
    room,  # R
    inputs,  # p
    out_batch,  # stride; over blocks where there are any
    out_head,
    out_token,
    per_group: tl.constexpr,
    size: tl.constexpr,  # D_t
    strips: tl.constexpr,  # some input is turned
    turns: tl.constexpr,  # the output is
    rows: tl.constexpr,  # tokens of a tile
    planes: tl.constexpr,  # of a step
    half: tl.constexpr,  # D_t / 2 or the power of two above it
    aligned: tl.constexpr,  # every row of every tensor starts at a multiple of 16 bytes
    paged: tl.constexpr,  # the output is in blocks
    widen: tl.constexpr,  # multiply in float32: the interpreter takes bf16 bits for integers
):
    """Compute `rows` tokens of one target head."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    group = head // per_group
    t = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = t < tokens
    low = tl.arange(0, half)
    width: tl.constexpr = per_group * size
    column = (head % per_group) * size + low
    valid = low < size // 2
    kind = weight.dtype.element_ty
    first = tl.zeros((rows, half), dtype=tl.float32)
    second = tl.zeros((rows, half), dtype=tl.float32)
    for at in range(count):
        step = steps + (group * room + at) * 4
        tensor = tensors + tl.load(step) * 6
        d = tl.load(step + 2) + tl.arange(0, planes)
        row = tl.load(step + 3)
        other = tl.load(tensor + 4) // 2  # from a plane's one channel to its other
        base = tl.load(tensor).to(entries.dtype)
        stride = tl.load(tensor + 3)
        skip = batch * tl.load(tensor + 1) + tl.load(step + 1) * tl.load(tensor + 2)
        if aligned:
            d = tl.max_contiguous(tl.multiple_of(d, planes), planes)
            other = tl.multiple_of(other, 8)
            base = tl.multiple_of(base, 16)
            stride = tl.multiple_of(stride, 8)
            skip = tl.multiple_of(skip, 8)
        mask = inside[:, None] & (d < other)[None, :]
        place = base + skip + t[:, None] * stride + d[None, :]
        x = tl.load(place, mask=mask, other=0.0)
        y = tl.load(place + other, mask=mask, other=0.0)
        if strips:
            angles = tl.load(tensor + 5)
            limit = tl.where(angles >= 0, other, 0)
            if aligned:
                limit = tl.multiple_of(limit, 8)
            turned = inside[:, None] & (d < limit)[None, :]
            where = angles + (batch * tokens + t[:, None]) * other + d[None, :]
            c = tl.load(cos + where, mask=turned, other=1.0)
            s = tl.load(sin + where, mask=turned, other=0.0)
            x = x.to(tl.float32)
            y = y.to(tl.float32)
            x, y = x * c + y * s, y * c - x * s
        x = x.to(kind)
        y = y.to(kind)
        load = (d < other)[:, None] & valid[None, :]
        above = weight + (group * inputs + row + d)[:, None] * width + column[None, :]
        below = above + other * width
        upper_first = tl.load(above, mask=load, other=0.0)
        lower_first = tl.load(below, mask=load, other=0.0)
        upper_second = tl.load(above + size // 2, mask=load, other=0.0)
        lower_second = tl.load(below + size // 2, mask=load, other=0.0)
        if widen:
            x = x.to(tl.float32)
            y = y.to(tl.float32)
            upper_first = upper_first.to(tl.float32)
            lower_first = lower_first.to(tl.float32)
            upper_second = upper_second.to(tl.float32)
            lower_second = lower_second.to(tl.float32)
        first = tl.dot(x, upper_first, first, input_precision="ieee")
        first = tl.dot(y, lower_first, first, input_precision="ieee")
        second = tl.dot(x, upper_second, second, input_precision="ieee")
        second = tl.dot(y, lower_second, second, input_precision="ieee")
    offset = bias + group * width + column
    first += tl.load(offset, mask=valid, other=0.0).to(tl.float32)[None, :]
    second += tl.load(offset + size // 2, mask=valid, other=0.0).to(tl.float32)[None, :]
    mask = inside[:, None] & valid[None, :]
    if turns:
        where = turn + (batch * tokens + t[:, None]) * (size // 2) + low[None, :]
        c = tl.load(cos + where, mask=mask, other=0.0)
        s = tl.load(sin + where, mask=mask, other=0.0)
        first, second = first * c - second * s, second * c + first * s
    line = batch * out_batch + t * out_token
    if paged:
        slot = tl.load(slots + batch * tokens + t, mask=inside, other=-1)
        mask = mask & (slot >= 0)[:, None]
        line = (slot // block) * out_batch + (slot % block) * out_token
    place = out + line[:, None] + head * out_head + low[None, :]
    tl.store(place, first.to(out.dtype.element_ty), mask=mask)
    tl.store(place + size // 2, second.to(out.dtype.element_ty), mask=mask)
