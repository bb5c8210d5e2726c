"""What quality costs: maps of several inputs, heads and k beside each other.

Quality is the held-out KL(native ‖ mapped) per token of a continuation, which the target itself
measures; R² says little about it. Cost is the multiply-adds of mapping one token, counted twice,
over the target's own for reading it (2 per weight). A map is on the frontier where none that
costs as little is better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvmap.errors import UsageError
from kvmap.fit.closed_form import fit_closed_form
from kvmap.fit.continuation import Lesson, lesson, loss
from kvmap.fit.job import Job
from kvmap.fit.recipes import Recipe, with_assignment
from kvmap.layers import choose_top, score_layers
from kvmap.mapping import CacheMap

COUNTS = (1, 2, 4, 8)
SEQUENCES = 8
CONTINUATION = 32


@dataclass(frozen=True)
class Point:
    """One candidate.

    Attributes:
        recipe: Its k is a number.
        parameters: Of the map.
        cost: Share of the target's own work per token.
        divergence: Held-out KL, nats per token.
        best: Whether it is on the frontier.
    """

    recipe: Recipe
    parameters: int
    cost: float
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
            "parameters": self.parameters,
            "cost": self.cost,
            "kl": self.divergence,
            "frontier": self.best,
        }


def frontier(job: Job) -> list[Point]:
    """Return all candidates, cheapest first, those on the frontier marked."""
    models = (job.open(0), job.open(1))
    work = 2 * sum(tensor.numel() for tensor in models[1].model.parameters())
    unseen = job.calibration.token_ids("held_out")[:SEQUENCES]
    candidates = list(_candidates(job))
    scores = score_layers(
        job.splits.train, job.splits.held_out, job.splits.source, job.splits.target
    )
    points, lessons = [], {}
    for done, recipe in enumerate(candidates):
        layers = choose_top(scores, recipe.k)
        fitted, _ = fit_closed_form(job.splits, layers, recipe.options, recipe.ridge)
        signatures = (job.calibration.source, job.calibration.target)
        cmap = CacheMap(*signatures, fitted, recipe.options)
        if not lessons:
            lessons[0] = lesson(cmap, models, unseen, _reach(unseen))
        divergence = _divergence(cmap, models[1], lessons[0])
        points.append(Point(recipe, cmap.parameters, 2 * cmap.parameters / work, divergence))
        job.progress("frontier", done + 1, len(candidates))
    return marked(points)


def _reach(unseen: Tensor) -> int:
    return min(CONTINUATION, unseen.shape[1] // 4)


@torch.no_grad()
def _divergence(cmap: CacheMap, target: Any, given: Lesson) -> float:
    return float(loss(cmap.to(target.device), target, given)[1])


def _candidates(job: Job) -> Iterator[Recipe]:
    """Vary inputs, heads and k; exact parts and the way of fitting stay the recipe's."""
    shapes = (job.splits.source, job.splits.target)
    counts = sorted({min(k, shapes[0].layers) for k in COUNTS})
    for heads in ("all", "matched"):
        for joint, anchor in ((False, False), (False, True), (True, True)):
            options = replace(
                job.recipe.options, heads=heads, joint=joint, anchor=anchor, assignment=()
            )
            for k in counts:
                yield replace(job.recipe, k=k, options=with_assignment(options, *shapes))


def marked(points: list[Point]) -> list[Point]:
    """Return points by cost, those marked that no cheaper one equals."""
    least, found = float("inf"), []
    for point in sorted(points, key=lambda point: (point.cost, point.divergence)):
        found.append(replace(point, best=point.divergence < least))
        least = min(least, point.divergence)
    return found


def within(points: list[Point], budget: float) -> Point:
    """Return the best point of at most this cost.

    Raises:
        UsageError: Every point costs more.
    """
    affordable = [point for point in points if point.cost <= budget]
    if not affordable:
        least = min(point.cost for point in points)
        raise UsageError(
            f"no map costs at most {budget:.3g} of the target's own work per token; "
            f"the cheapest takes {least:.3g}, see `kvmap fit --frontier`"
        )
    return min(affordable, key=lambda point: point.divergence)
