"""What measuring a frontier takes: every candidate's fit, and what the target says after each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvmap import fit, plan
from kvmap.calibration import Calibration
from kvmap.collect_pair import Loading
from kvmap.fit import frontier
from kvmap.fit_pair import FitRequest
from kvmap.fit_stages import FitSize, stages
from kvmap.footprint import map_parameters
from kvmap.plan import forward_flops
from kvmap.plan_fit import require_recorded, size_of


def frontier_plan(
    calibration: Calibration, request: FitRequest, loading: Loading
) -> dict[str, Any]:
    """Return how many maps a frontier fits and measures, and what that takes.

    None where a model's config is not at hand.
    """
    size, rate = size_of(calibration, request, loading), plan.matmul_rate()
    kept = calibration.scope.lookback_layers
    asked = list(frontier.candidates(size.recipe, size.shapes, kept))
    for one in asked:
        require_recorded(one.options, calibration.scope)
    fitted = [
        replace(size, recipe=fit.Recipe(one.k, one.ridge, one.options), k=one.k)
        for one in dict.fromkeys(replace(one, rank=None) for one in asked)
    ]
    rows = [row for one in fitted for row in stages(one, rate)]
    tails = frontier.tails(size.recipe, size.grid[1])
    found = {"candidates": len(asked), "fits": len(fitted), "tails": tails}
    if None in size.models:
        return {**found, "peak_bytes": None, "flops": None, "seconds": None}
    solving = sum(row["flops"] for row in rows) + _ranking(size, asked)
    measuring = _measuring(size, asked, tails)
    weights = sum(model.parameters * model.itemsize for model in size.models)
    return {
        **found,
        "peak_bytes": max(row["peak_bytes"] for row in rows) + weights,
        "flops": solving + measuring,
        # Systems are solved in float64, in twice the time of the float32 that is measured here.
        "seconds": (2 * solving + measuring) / rate,
    }


def _ranking(size: FitSize, asked: list[fit.Recipe]) -> float:
    """Return the FLOPs of keeping weights as two factors: products with both splits' Gram."""
    shapes = [replace(size, recipe=one, k=one.k).regressions for one in asked if one.rank]
    return sum(8.0 * mapped * groups * p * p * q for mapped, groups, p, q in shapes)


def _measuring(size: FitSize, asked: list[fit.Recipe], tails: list[int]) -> float:
    """Return the FLOPs of reading held-out sequences, and of every candidate's answers to them."""
    sequences, length = min(frontier.SEQUENCES, size.held_out), size.grid[1]
    pairs = [
        (model.parameters, shape) for model, shape in zip(size.models, size.shapes, strict=True)
    ]
    reading = sum(forward_flops(*pair, (sequences, length)) for pair in pairs)
    applied = sequences + 1 + frontier.ROUNDS
    mapping = sum(2.0 * map_parameters(one, one.k, *size.shapes) * length for one in asked)
    speaking = sum(
        forward_flops(*pairs[1], (sequences, tail + frontier.reach(length))) for tail in tails
    )
    return len(tails) * (reading + applied * mapping) + len(asked) * speaking
