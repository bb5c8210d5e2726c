"""What quality costs: maps of several inputs, heads, k, ranks and native tails side by side.

Quality is the held-out KL(native ‖ mapped) per token of a continuation, which the target itself
measures; R² says little about it. Cost is counted and measured, both for contexts of the
calibration's length: the multiply-adds of map and tail over the target's own for a prefill (2 per
weight and token), and the median time of applying the map and running the tail. A map is on the
frontier where none that costs as little is better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, product
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kvmap.engine import prepare
from kvmap.errors import UsageError
from kvmap.fit.closed_form import fit_closed_form
from kvmap.fit.continuation import Lesson, lesson, loss
from kvmap.fit.job import Job
from kvmap.fit.low_rank import reduce_rank
from kvmap.fit.recipes import Recipe, with_assignment
from kvmap.geometry import Geometry
from kvmap.handoff import LapClock, map_middle
from kvmap.layers import LayerScores, choose_top, score_layers
from kvmap.mapping import CacheMap
from kvmap.models import LoadedModel, prefill

COUNTS = (1, 2, 4, 8)
# Of maps of all heads, by the share of held-out error that a lower rank may add.
RANKS = (0.01, 0.1, 0.5)
# By joint, anchor, lookback and how many of the layers kept for it are read, None for all.
INPUTS = (
    (False, False, 0, 1),
    (False, False, 3, 1),
    (True, False, 3, 1),
    (True, True, 3, 1),
    (True, True, 3, None),
)
SEQUENCES = 8
CONTINUATION = 32
# Times that a candidate is applied, after once for nothing.
ROUNDS = 3


@dataclass(frozen=True)
class Point:
    """One candidate.

    Attributes:
        recipe: Its k is a number, its tail what a context of the calibration's length has.
        parameters: Of the map.
        cost: Share of a prefill's work.
        milliseconds: Map and tail of one context, on the machine at hand.
        divergence: Held-out KL, nats per token.
        best: Whether it is on the frontier.
    """

    recipe: Recipe
    parameters: int
    cost: float
    milliseconds: float
    divergence: float
    best: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        options = self.recipe.options
        return {
            "k": self.recipe.k,
            "heads": options.heads,
            "joint": options.joint,
            "anchor": options.anchor,
            "lookback": options.lookback,
            "lookback_layers": list(options.lookback_layers),
            "rank": self.recipe.rank,
            "native_tail": options.native_tail,
            "parameters": self.parameters,
            "cost": self.cost,
            "milliseconds": self.milliseconds,
            "kl": self.divergence,
            "frontier": self.best,
        }


# Told of a candidate's points, how many candidates are done and how many there are.
Told = Callable[[list[Point], int, int], None]


def frontier(job: Job, told: Told = lambda points, done, total: None) -> list[Point]:
    """Return all candidates, cheapest first, those on the frontier marked."""
    models = (job.open(0), job.open(1))
    unseen = job.calibration.token_ids("held_out")[:SEQUENCES]
    length = unseen.shape[1]
    lessons = {
        tail: lesson(models, unseen, reach(length), job.recipe.options.native_head, tail)
        for tail in tails(job.recipe, length)
    }
    timed = partial(_seconds, models[1].device)
    waits = {tail: timed(lambda at=at: _run_tail(at, models[1])) for tail, at in lessons.items()}
    work = 2 * sum(tensor.numel() for tensor in models[1].model.parameters())
    splits = job.splits
    scores = score_layers(splits.train, splits.held_out, splits.source, splits.target)
    kept = splits.train.lookback_layers
    asked, points = list(candidates(job.recipe, (splits.source, splits.target), kept)), []
    for done, (recipe, cmap) in enumerate(_maps(job, asked, scores)):
        cmap = prepare(cmap, models[1].device)
        found = []
        for tail, given in lessons.items():
            spent = waits[tail] + timed(lambda m=cmap, at=given: _run_map(m, at, models[1]))
            share = 2 * cmap.parameters / work + tail / length
            made = replace(recipe, options=replace(recipe.options, native_tail=tail))
            divergence = float(_divergence(cmap, models[1], given))
            found.append(Point(made, cmap.parameters, share, 1e3 * spent, divergence))
        points += found
        job.progress("frontier", done + 1, len(asked))
        told(found, done + 1, len(asked))
    return marked(points)


def reach(length: int) -> int:
    """Return how many last tokens of a sequence are predicted."""
    return min(CONTINUATION, length // 4)


def tails(recipe: Recipe, length: int) -> list[int]:
    """Return the native tails that every map is measured with."""
    return sorted({1, recipe.options.tail_length(length)})


def _maps(job: Job, asked: list[Recipe], scores: LayerScores) -> Iterator[tuple[Recipe, CacheMap]]:
    """Yield each candidate's map; neighbours that differ in rank alone share a fit."""
    signatures = (job.calibration.source, job.calibration.target)
    for whole, ranked in groupby(asked, lambda recipe: replace(recipe, rank=None)):
        layers = choose_top(scores, whole.k)
        fitted, _ = fit_closed_form(job.splits, layers, whole.options, whole.ridge)
        cmap = CacheMap(*signatures, fitted, whole.options)
        for recipe in ranked:
            yield recipe, reduce_rank(cmap, job.splits, recipe.rank) if recipe.rank else cmap


@torch.no_grad()
def _divergence(cmap: CacheMap, target: LoadedModel, given: Lesson) -> Tensor:
    return loss(cmap, target, given)[1]


def _run_map(cmap: CacheMap, given: Lesson, target: LoadedModel) -> None:
    """Map one of a lesson's contexts."""
    before = given.before and given.before.first(1)
    past = given.native.slice(0, given.head).first(1) if given.head else None
    map_middle(cmap, target, given.source.first(1), past=past, before=before)


def _run_tail(given: Lesson, target: LoadedModel) -> None:
    """Let the target read the tail of one of a lesson's contexts."""
    prefill(target, given.token_ids[:1, : given.tail], past=given.native.first(1))


def _seconds(device: torch.device, run: Callable[[], None]) -> float:
    """Return the median time of a few rounds."""
    clock, spent = LapClock(device), []
    for _ in range(1 + ROUNDS):
        run()
        clock.lap("run")
        spent.append(clock.seconds["run"])
    return median(spent[1:])


def candidates(
    recipe: Recipe, shapes: tuple[Geometry, Geometry], kept: tuple[int, ...]
) -> Iterator[Recipe]:
    """Vary inputs, heads, k and rank; exact parts and the way of fitting stay the recipe's.

    Args:
        kept: Layers of the tokens before that the calibration keeps.
    """
    counts = sorted({min(k, shapes[0].layers) for k in COUNTS})
    inputs = INPUTS if len(kept) > 1 else INPUTS[:-1]
    for heads in ("all", "matched"):
        for joint, anchor, lookback, count in inputs:
            reads = {"joint": joint, "anchor": anchor, "lookback": lookback}
            reads["lookback_layers"] = kept[:count]
            options = replace(recipe.options, heads=heads, assignment=(), **reads)
            complete = with_assignment(options, *shapes)
            for k, rank in product(counts, RANKS if heads == "all" else (None,)):
                yield replace(recipe, k=k, rank=rank, options=complete)


def marked(points: list[Point]) -> list[Point]:
    """Return points by cost, those marked that no cheaper one equals."""
    least, found = float("inf"), []
    for point in sorted(points, key=lambda point: (point.cost, point.divergence)):
        found.append(replace(point, best=point.divergence < least))
        least = min(least, point.divergence)
    return found


def within(points: list[Point], budget: float, unit: str = "share") -> Point:
    """Return the best point of at most this cost.

    Args:
        unit: "share" of a prefill's work, or "ms" for one context.

    Raises:
        UsageError: Every point costs more.
    """
    costs = [point.cost if unit == "share" else point.milliseconds for point in points]
    affordable = [point for point, cost in zip(points, costs, strict=True) if cost <= budget]
    if not affordable:
        shown = "of a prefill's work" if unit == "share" else "ms"
        raise UsageError(
            f"no map costs at most {budget:.3g} {shown}; the cheapest takes {min(costs):.3g}, "
            "see `kvmap fit --frontier`"
        )
    return min(affordable, key=lambda point: point.divergence)


def plot(points: list[Point], path: Any) -> None:
    """Draw held-out KL by cost as an image, the frontier as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for heads in ("all", "matched"):
        mine = [point for point in points if point.recipe.options.heads == heads]
        pairs = [(point.cost, point.divergence) for point in mine]
        axes.loglog(*zip(*pairs, strict=True), "o", label=f"{heads} heads")
    best = [(point.cost, point.divergence) for point in points if point.best]
    axes.loglog(*zip(*best, strict=True), "-", color="black", label="frontier")
    axes.set(xlabel="share of a prefill's work", ylabel="KL(native ‖ mapped), nats per token")
    axes.legend()
    figure.savefig(path)
