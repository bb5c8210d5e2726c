"""Where a mapped cache goes blind: accuracy by depth and by length of context."""

from __future__ import annotations

from typing import Any

from kvmap.evaluate.scores import Scores, has_accuracy

ARMS = ("native", "source", "mapped", "wrong_document")


def grid(scores: Scores) -> dict[str, Any] | None:
    """Return means with depths down and lengths across; None where questions have neither."""
    if not scores.labels or not {"depth", "length"} <= set(scores.labels[0]):
        return None
    if not has_accuracy(scores):
        return None
    depths, lengths = (sorted({row[name] for row in scores.labels}) for name in ("depth", "length"))
    cells = [[_cell(scores, depth, length) for length in lengths] for depth in depths]
    return {"depths": depths, "lengths": lengths} | {
        arm: [[cell[arm] for cell in row] for row in cells] for arm in ARMS
    }


def _cell(scores: Scores, depth: float, length: int) -> dict[str, float | None]:
    own = scores.where(lambda row: (row["depth"], row["length"]) == (depth, length))
    found = {arm: own.column("accuracy", arm) for arm in ARMS}
    return {arm: column.mean().item() if len(column) else None for arm, column in found.items()}
