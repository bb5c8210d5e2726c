"""Fit a map in closed form from a calibration's moments.

Per target layer, and per head where heads are matched, one ridge regression for keys and
one for values (one for both where they share inputs). The relative λ is given, or taken per
layer and kind from a grid by the error on held-out sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.columns import KINDS, Block
from kvmap.geometry import Geometry
from kvmap.mapping import Affine, LayerMap, MapOptions, input_blocks
from kvmap.moments import Moments
from kvmap.ridge import Covariance, r2, solve, squared_error

RIDGE_GRID = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


@dataclass(frozen=True)
class Splits:
    """Moments to fit on and to choose on, and the two geometries."""

    train: Moments
    held_out: Moments
    source: Geometry
    target: Geometry


@dataclass(frozen=True)
class FitScores:
    """R² by kind, [L_t, H_t], and the ridge used, [L_t]; NaN where a layer is exact."""

    train: dict[str, Tensor]
    held_out: dict[str, Tensor]
    ridge: dict[str, Tensor]
    rows_per_input: float

    def mean(self, split: str, kind: str) -> float:
        """Return the mean R² over mapped layers and heads."""
        return float(getattr(self, split)[kind].nanmean())


def fit_closed_form(
    splits: Splits,
    layers: tuple[tuple[int, ...], ...],
    options: MapOptions,
    ridge: float | str = "auto",
    progress: Callable[[], None] = lambda: None,
) -> tuple[tuple[LayerMap | None, ...], FitScores]:
    """Return the fitted layers, float32, and how well they predict.

    Args:
        layers: Source layers of each target layer.
        ridge: Relative λ, or "auto".
    """
    scores = _empty_scores(splits.target)
    fitted: list[LayerMap | None] = []
    inputs = 0
    for index, chosen in enumerate(layers):
        if index == 0 and options.exact_first:
            fitted.append(None)
            continue
        parts = {
            kind: _fit_kind(splits, index, chosen, kind, options, ridge, scores) for kind in KINDS
        }
        inputs = max(inputs, parts["key"].weight.shape[1])
        fitted.append(LayerMap(tuple(chosen), **parts))
        progress()
    ratio = splits.train.count / max(inputs, 1)
    return tuple(fitted), FitScores(*scores, rows_per_input=ratio)


def layer_score(
    splits: Splits, index: int, chosen: tuple[int, ...], options: MapOptions, ridge: float
) -> float:
    """Return one target layer's held-out R², mean over K, V and heads, from some source layers."""
    scores = _empty_scores(splits.target)
    for kind in KINDS:
        _fit_kind(splits, index, chosen, kind, options, ridge, scores)
    return float(sum(scores[1][kind][index].mean() for kind in KINDS)) / len(KINDS)


def _empty_scores(target: Geometry) -> tuple[dict, dict, dict]:
    table = lambda: torch.full((target.layers, target.kv_heads), float("nan"), dtype=torch.float64)  # noqa: E731
    ridges = lambda: torch.full((target.layers,), float("nan"), dtype=torch.float64)  # noqa: E731
    return ({k: table() for k in KINDS}, {k: table() for k in KINDS}, {k: ridges() for k in KINDS})


def _fit_kind(splits, index, chosen, kind, options, ridge, scores) -> Affine:
    train, held_out, ridges = scores
    problems = [
        tuple(moments.covariance(inputs, outputs) for moments in (splits.train, splits.held_out))
        for inputs, outputs in _regressions(splits, index, chosen, kind, options)
    ]
    value = choose_ridge(problems) if ridge == "auto" else float(ridge)
    solutions = [solve(fitted, value) for fitted, _ in problems]
    for table, split in ((train, 0), (held_out, 1)):
        found = [
            r2(pair[split], *solution, splits.target.head_size)
            for pair, solution in zip(problems, solutions, strict=True)
        ]
        table[kind][index] = torch.cat(found).cpu()
    ridges[kind][index] = value
    weight = torch.stack([solution[0] for solution in solutions])
    bias = torch.stack([solution[1] for solution in solutions])
    return Affine(weight.float(), bias.float())


def _regressions(splits, index, chosen, kind, options) -> list[tuple[list[Block], list[Block]]]:
    """Return inputs and outputs of each regression of a layer: one, or one per target head."""
    heads = (splits.source.kv_heads, splits.target.kv_heads)
    if options.heads == "all":
        outputs = [Block("target", kind, index, head) for head in range(heads[1])]
        return [(input_blocks(options, chosen, kind, None, heads), outputs)]
    return [
        (input_blocks(options, chosen, kind, head, heads), [Block("target", kind, index, head)])
        for head in range(heads[1])
    ]


def choose_ridge(problems: list[tuple[Covariance, Covariance]]) -> float:
    """Return the ridge of the grid with the least error on held-out moments."""
    errors = {}
    for value in RIDGE_GRID:
        errors[value] = sum(
            float(squared_error(held_out, *solve(train, value)).sum())
            for train, held_out in problems
        )
    return min(errors, key=errors.get)
