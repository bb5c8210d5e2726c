"""Count rows by how much later queries read them (arXiv 2609.00891, attention repair).

At boundary c the query of token c attends with a_u to the rows u < c of a cache. To first
order the error of its attention output is Σ_u a_u·δv_u for errors of values and
Σ_u a_u·(v_u - o)·(q·δk_u)/√D for errors of keys, so over the query heads of a KV head

    r_V(u) = Σ a_u²        r_K(u) = Σ a_u²·‖v_u - o‖²·‖q‖²/D.

Each is normalised per boundary, summed over boundaries, scaled to mean 1 and shrunk towards 1
until the effective number of rows (Σw)²/Σw² (Kish) is at least twice the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvmap.calibration import Calibration
from kvmap.columns import Block, Group, head_sizes
from kvmap.errors import UsageError
from kvmap.fit.closed_form import Splits, regressions
from kvmap.mapping import MapOptions
from kvmap.models import LoadedModel
from kvmap.models.attention import visit_attention
from kvmap.moments import Moments

BOUNDARIES = 32
BATCH = 4
# Effective rows for each input, at least.
ROWS_PER_INPUT = 2

# By kind and target layer: a weight for each row, [N, T / stride, H_t].
Weights = dict[tuple[str, int], Tensor]


def boundaries(tokens: int, count: int = BOUNDARIES) -> Tensor:
    """Return up to `count` token numbers from 1 to tokens - 1, evenly spread in their logarithm."""
    spread = torch.logspace(0, torch.tensor(max(tokens - 1.0, 1.0)).log10().item(), count)
    return spread.round().long().clamp(1, max(tokens - 1, 1)).unique()


def row_reads(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, at: Tensor
) -> tuple[Tensor, Tensor]:
    """Return r_K and r_V [B, H, T], each normalised per boundary and summed over them.

    Args:
        query: [B, Hq, T, D], like key and value [B, H, T, D] after RoPE.
        at: Boundaries.
    """
    heads, tokens = key.shape[1], key.shape[2]
    query, key, value = query.float(), key.float(), value.float()
    asked = query[:, :, at].unflatten(1, (heads, -1))  # [B, H, group, C, D]
    key, value = key[:, :, None], value[:, :, None]  # [B, H, 1, T, D]
    future = torch.arange(tokens, device=at.device) > at[:, None]  # [C, T]
    scores = (asked @ key.mT * scaling).masked_fill(future.to(key.device), -torch.inf)
    attention = scores.softmax(-1)
    output = attention @ value
    distance = value.square().sum(-1)[..., None, :] + output.square().sum(-1, keepdim=True)
    distance = (distance - 2 * output @ value.mT).clamp_min(0)
    own = torch.arange(tokens, device=at.device) == at[:, None]
    squared = attention.square().masked_fill(own.to(key.device), 0.0)
    steer = asked.square().sum(-1, keepdim=True) / asked.shape[-1]
    return _per_boundary(squared * distance * steer), _per_boundary(squared)


def _per_boundary(reads: Tensor) -> Tensor:
    summed = reads.sum(2)  # over the query heads of a KV head: [B, H, C, T]
    return (summed / summed.sum(-1, keepdim=True).clamp_min(1e-30)).sum(2)


def attention_weights(
    target: LoadedModel,
    token_ids: Tensor,
    stride: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Weights:
    """Run the target over sequences [N, T] and return how much its rows are read."""
    at = boundaries(token_ids.shape[1]).to(target.device)
    found: dict[tuple[str, int], list[Tensor]] = {}

    def visit(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        reads = row_reads(query, key, value, scaling, at)
        for kind, made in zip(("key", "value"), reads, strict=True):
            found.setdefault((kind, layer), []).append(made[:, :, ::stride].mT.cpu())

    for start in range(0, token_ids.shape[0], BATCH):
        visit_attention(target, token_ids[start : start + BATCH], visit)
        progress(min(start + BATCH, token_ids.shape[0]), token_ids.shape[0])
    return {name: torch.cat(parts) for name, parts in found.items()}


def shrunk(weights: Tensor, inputs: int) -> Tensor:
    """Scale weights [n] to mean 1 and draw them towards 1 until the Kish size is 2·inputs.

    With Σw = n and Q = Σw², w' = 1 + s(w - 1) has Σw'² = n + s²(Q - n).
    """
    count, mean = weights.numel(), weights.double().mean()
    if mean <= 0:  # nothing is read: all rows count alike
        return torch.ones_like(weights, dtype=torch.float64)
    weights = weights.double() / mean
    excess = float(weights.square().sum()) - count
    room = count * count / (ROWS_PER_INPUT * inputs) - count
    if excess <= room or excess <= 0:
        return weights
    return 1 + max(room / excess, 0.0) ** 0.5 * (weights - 1)


def weighted_splits(
    calibration: Calibration,
    splits: Splits,
    weights: Weights,
    layers: tuple[tuple[int, ...], ...],
    options: MapOptions,
) -> Splits:
    """Return splits whose training rows count by weight; held-out rows count alike.

    Moments are kept for the chosen layers alone: no two outputs share theirs.

    Raises:
        UsageError: The calibration has no dump.
    """
    if not calibration.index["shards"]:
        raise UsageError(
            f"{calibration.path}: row weights need the rows, found moments alone; "
            "run `kvmap collect` again without --no-dump"
        )
    found = _groups(replace(splits, apart=True), layers, options)
    sizes = head_sizes(splits.source, splits.target)
    total = Moments(found, sizes)
    stride = calibration.index["options"]["stride"]
    train = ~calibration.sequences["held_out"]
    scaled = _scaled(found, weights, train, options.native_head, stride, sizes)
    for rows, position, sequence in calibration.shards():
        members = train[sequence] & (position >= options.native_head)
        if members.any():
            place = (sequence[members], position[members] // stride)
            for group in found:
                x, y = (rows.design(b)[members] for b in (group.inputs, group.outputs))
                total.add(group, weighted_moments(x, y, scaled[group.name][place]))
    return replace(splits, train=total, apart=True)


def _groups(
    splits: Splits, layers: tuple[tuple[int, ...], ...], options: MapOptions
) -> tuple[Group, ...]:
    return tuple(
        Group(f"{outputs[0].kind}.{index}.{outputs[0].head}", tuple(inputs), tuple(outputs))
        for index, chosen in enumerate(layers)
        if index >= options.exact_layers
        for inputs, outputs in regressions(splits, index, chosen, options)
    )


def _scaled(
    groups: tuple[Group, ...],
    weights: Weights,
    train: Tensor,
    head: int,
    stride: int,
    sizes: dict[str, int],
) -> dict[str, Tensor]:
    """Return each group's weights [N, T / stride], mean 1 over the rows of the fit."""
    made = {}
    for group in groups:
        reads = _reads(weights, group.outputs).double()
        kept = train[:, None] & (torch.arange(reads.shape[1]) * stride >= head)
        inputs = sum(sizes[block.side] for block in group.inputs)
        made[group.name] = torch.ones_like(reads)
        made[group.name][kept] = shrunk(reads[kept], inputs)
    return made


def _reads(weights: Weights, outputs: tuple[Block, ...]) -> Tensor:
    """Return the reads of one head, or the mean over the heads that share a regression."""
    table = weights[outputs[0].kind, outputs[0].layer]
    return table[..., [block.head for block in outputs]].mean(-1)


def weighted_moments(x: Tensor, y: Tensor, weight: Tensor) -> dict[str, Tensor]:
    """Return moments in which row i of inputs [n, p] and outputs [n, q] counts weight[i] times."""
    count = weight.sum()
    input_mean, output_mean = weight @ x / count, weight @ y / count
    x, y = x - input_mean, y - output_mean
    pulled = x * weight[:, None]
    return {
        "count": count[None],
        "input_mean": input_mean,
        "output_mean": output_mean,
        "gram": pulled.mT @ x,
        "cross": pulled.mT @ y,
        "output_square": weight @ (y * y),
    }
