"""Keep a fitted weight as two factors of rank r: p·r + r·q numbers in place of p·q.

Of all rank-r maps the one nearest to W on held-out inputs of covariance C has the least
‖C^½(W - W_r)‖. With V the r leading eigenvectors of WᵀCW [q, q] that is W_r = (WV)Vᵀ: the
outputs are projected on the directions in which W makes them vary most.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvmap.fit.closed_form import Splits, regressions
from kvmap.mapping import Affine, CacheMap


def reduce_rank(cmap: CacheMap, splits: Splits, rank: int) -> CacheMap:
    """Return the map with every weight of rank `rank`, where that makes it smaller."""
    apart = replace(splits, weighted=True)

    def reduced(place: tuple[int, str], part: Affine) -> Affine:
        index, kind = place
        layer = cmap.layers[index]
        grams = [
            _held_out(splits, inputs, outputs)
            for inputs, outputs in regressions(apart, index, layer.source_layers, cmap.options)
            if outputs[0].kind == kind
        ]
        return factored(part, torch.stack(grams), rank)

    return cmap.each(reduced)


def _held_out(splits: Splits, inputs: list, outputs: list) -> Tensor:
    covariance = splits.held_out.covariance(inputs, outputs)
    return covariance.gram / max(covariance.count, 1.0)


def factored(part: Affine, covariance: Tensor, rank: int) -> Affine:
    """Return a part of rank `rank` for inputs of covariance [G, p, p]; itself if not smaller."""
    _, p, q = part.weight.shape
    if part.up is not None or rank * (p + q) >= p * q:
        return part
    weight = part.weight.double()
    values = weight.mT @ covariance.to(weight) @ weight  # [G, q, q]
    leading = torch.linalg.eigh(values).eigenvectors[..., -rank:]
    return replace(
        part, weight=(weight @ leading).to(part.weight), up=leading.mT.to(part.weight).contiguous()
    )
