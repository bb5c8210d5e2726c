"""Which source KV head each target KV head reads, chosen by held-out R².

Heads have no order: head 0 of one model corresponds to head 0 of another only by accident,
or where both come of one ancestor. For every pair of heads the best single source layer's
probe is scored for each target layer, keys and values alike; a target head takes the source
head of the best mean over layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvmap.columns import KINDS, Block
from kvmap.fit.closed_form import Splits
from kvmap.layers import PROBE_RIDGE
from kvmap.ridge import r2, solve


def head_scores(splits: Splits) -> Tensor:
    """Return held-out R² [H_t, H_s], mean over target layers and kinds of the best source layer.

    Raises:
        UsageError: The moments know matched heads only.
    """
    source, target = splits.source, splits.target
    scores = torch.zeros(len(KINDS), target.layers, target.kv_heads, source.kv_heads, source.layers)
    for at, kind in enumerate(KINDS):
        outputs = [
            Block("target", kind, layer, head)
            for layer in range(target.layers)
            for head in range(target.kv_heads)
        ]
        for head in range(source.kv_heads):
            for layer in range(source.layers):
                inputs = [Block("source", kind, layer, head)]
                solution = solve(splits.train.covariance(inputs, outputs), PROBE_RIDGE)
                unseen = splits.held_out.covariance(inputs, outputs)
                found = r2(unseen, *solution, target.head_size).cpu()
                scores[at, :, :, head, layer] = found.unflatten(0, (target.layers, -1))
    return scores.amax(-1).mean((0, 1))


def best_assignment(splits: Splits) -> tuple[int, ...]:
    """Return the source head each target head reads; several may read the same."""
    return tuple(head_scores(splits).argmax(1).tolist())
