"""Fit a map in closed form from a calibration's moments.

Per target layer, and per head where heads are matched, one ridge regression for keys and one
for values; one for both where they share inputs and rows count alike. The relative λ is given,
or taken for every layer, kind and head from a grid by the error on held-out sequences: each
system is factored once per λ, whatever the number of heads that read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from kvmap.columns import KINDS, Block
from kvmap.geometry import Geometry
from kvmap.map_options import MapOptions, input_blocks
from kvmap.mapping import Affine, LayerMap
from kvmap.moments import Moments
from kvmap.ridge import Covariance, explained_share, fitted_error, solve, squared_error

RIDGE_GRID = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)
# Of Gram matrices solved together: small ones take less time than the calls to solve them.
TOGETHER_BYTES = 8 << 20


@dataclass(frozen=True)
class Splits:
    """Moments to fit on and to choose on, and the two geometries.

    `apart` says that keys and values share no solve, since rows count differently for either.
    """

    train: Moments
    held_out: Moments
    source: Geometry
    target: Geometry
    apart: bool = False


@dataclass(frozen=True)
class FitScores:
    """R² and the ridge used by kind, [L_t, H_t] each; NaN where a layer is exact."""

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
    ridges = RIDGE_GRID if ridge == "auto" else (float(ridge),)
    wanted = {at: tuple(chosen) for at, chosen in enumerate(layers) if at >= options.exact_layers}
    fitted = _fit_layers(splits, wanted, options, ridges, scores, progress)
    inputs = max((layer.key.weight.shape[1] for layer in fitted.values()), default=1)
    found = tuple(fitted.get(at) for at in range(len(layers)))
    return found, FitScores(**scores, rows_per_input=splits.train.count / inputs)


def layer_score(
    splits: Splits,
    index: int,
    chosen: tuple[int, ...],
    options: MapOptions,
    ridges: Sequence[float],
) -> float:
    """Return one target layer's held-out R², mean over K, V and heads, from some source layers."""
    scores = _empty_scores(splits.target)
    _fit_layers(splits, {index: chosen}, options, ridges, scores)
    return float(sum(scores["held_out"][kind][index].mean() for kind in KINDS)) / len(KINDS)


Tables = dict[str, dict[str, Tensor]]


def _empty_scores(target: Geometry) -> Tables:
    table = lambda: torch.full((target.layers, target.kv_heads), float("nan"), dtype=torch.float64)  # noqa: E731
    return {name: {kind: table() for kind in KINDS} for name in ("train", "held_out", "ridge")}


def _fit_layers(
    splits: Splits,
    chosen: dict[int, tuple[int, ...]],
    options: MapOptions,
    ridges: Sequence[float],
    scores: Tables,
    progress: Callable[[], None] = lambda: None,
) -> dict[int, LayerMap]:
    """Solve the regressions of some layers, small ones together, and note their scores.

    Args:
        chosen: Source layers by target layer.
    """
    size = splits.target.head_size
    parts: dict[tuple[int, str], list[tuple[Tensor, Tensor]]] = {}
    for batch in _batches(splits, chosen, options):
        pair = [
            Covariance.stacked([moments.covariance(*blocks) for blocks in batch])
            for moments in (splits.train, splits.held_out)
        ]
        weight, bias, found = solve_best(*pair, ridges, size)
        for at, (_, outputs) in enumerate(batch):
            for kind, own in groupby(enumerate(outputs), lambda place: place[1].kind):
                places, blocks = zip(*own, strict=True)
                index, heads = blocks[0].layer, [block.head for block in blocks]
                columns = slice(places[0] * size, (places[-1] + 1) * size)
                solved = (weight[at, :, columns].float(), bias[at, columns].float())
                parts.setdefault((index, kind), []).append(solved)
                for name, values in found.items():
                    scores[name][kind][index, heads] = values[at, list(places)].cpu()
            if (outputs[-1].kind, outputs[-1].head) == (KINDS[-1], splits.target.kv_heads - 1):
                progress()
    return {
        index: LayerMap(layers, *(_affine(parts.pop((index, kind))) for kind in KINDS))
        for index, layers in chosen.items()
    }


def _affine(solved: list[tuple[Tensor, Tensor]]) -> Affine:
    """Return a part of the weights [p, q] and biases [q] of its groups of heads."""
    return Affine(*map(torch.stack, zip(*solved, strict=True)))


Blocks = tuple[list[Block], list[Block]]


def _batches(
    splits: Splits, chosen: dict[int, tuple[int, ...]], options: MapOptions
) -> Iterator[list[Blocks]]:
    """Yield the regressions of some layers, those of one shape together while they are small."""
    work = [
        blocks
        for index, layers in chosen.items()
        for blocks in regressions(splits, index, layers, options)
    ]
    for _, found in groupby(work, lambda blocks: tuple(map(len, blocks))):
        alike = list(found)
        inputs = sum(splits.train.sizes[block.side] for block in alike[0][0])
        most = max(1, TOGETHER_BYTES // (8 * inputs * inputs))
        for start in range(0, len(alike), most):
            yield alike[start : start + most]


def regressions(
    splits: Splits, index: int, chosen: tuple[int, ...], options: MapOptions
) -> list[Blocks]:
    """Return inputs and outputs of each regression of a layer.

    All heads make one regression, or one per kind; matched heads one per head and kind, or per
    head where both kinds read the same inputs.
    """
    heads = (splits.source.kv_heads, splits.target.kv_heads)
    together = [KINDS] if options.joint and not splits.apart else [(kind,) for kind in KINDS]
    per_head = [None] if options.heads == "all" else list(range(heads[1]))
    return [
        (
            input_blocks(options, chosen, kinds[0], head, heads),
            [
                Block("target", kind, index, own)
                for kind in kinds
                for own in (range(heads[1]) if head is None else (head,))
            ],
        )
        for kinds in together
        for head in per_head
    ]


def regressions_of(
    splits: Splits, kind: str, index: int, chosen: tuple[int, ...], options: MapOptions
) -> list[Blocks]:
    """Return inputs and outputs of a layer's regressions of "key" or of "value" alone."""
    found = regressions(replace(splits, apart=True), index, chosen, options)
    return [blocks for blocks in found if blocks[1][0].kind == kind]


def solve_best(
    train: Covariance, held_out: Covariance, ridges: Sequence[float], head_size: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return weight [p, q], bias [q] and, per head [q / head_size], the ridge of least error.

    The error is that of the held-out moments; the weight's columns may come of several ridges.
    The search starts in the middle of the ridges, in order, and goes on either way for as long
    as some head gains.

    Returns:
        The third: "ridge", and R² "train" and "held_out", per head.
    """
    found = _Best(train, held_out, head_size)
    middle = len(ridges) // 2
    found.try_ridge(ridges[middle])
    for way in (ridges[middle + 1 :], ridges[:middle][::-1]):
        for ridge in way:
            if not found.try_ridge(ridge):
                break
    own = fitted_error(train, found.weight, found.ridge.repeat_interleave(head_size, -1))
    scores = {
        "ridge": found.ridge,
        "train": explained_share(own, train, head_size),
        "held_out": explained_share(found.error, held_out, head_size),
    }
    return found.weight, found.bias, scores


class _Best:
    """The solutions of least held-out error so far, head by head."""

    def __init__(self, train: Covariance, held_out: Covariance, head_size: int) -> None:
        self.train, self.held_out, self.head_size = train, held_out, head_size
        self.weight, self.bias = torch.zeros_like(train.cross), torch.zeros_like(train.output_mean)
        self.error = torch.full_like(train.output_mean, torch.inf)
        self.ridge = torch.zeros_like(train.output_mean[..., ::head_size])

    def try_ridge(self, ridge: float) -> bool:
        """Solve for a ridge and keep what is better; return whether anything is."""
        weight, bias = solve(self.train, ridge)
        error = squared_error(self.held_out, weight, bias)
        mine, other = (e.unflatten(-1, (-1, self.head_size)).sum(-1) for e in (error, self.error))
        better = mine < other
        self.ridge = torch.where(better, ridge, self.ridge)
        columns = better.repeat_interleave(self.head_size, -1)
        self.error = torch.where(columns, error, self.error)
        self.weight = torch.where(columns[..., None, :], weight, self.weight)
        self.bias = torch.where(columns, bias, self.bias)
        return bool(better.any())
