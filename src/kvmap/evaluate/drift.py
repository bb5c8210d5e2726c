"""How two arms grow apart over a conversation's turns."""

from __future__ import annotations

from typing import Any

import torch

from kvmap.evaluate import statistics
from kvmap.evaluate.scores import Scores, has_accuracy
from kvmap.evaluate.statistics import ends


def drift(scores: Scores, seed: int = 0) -> dict[str, Any] | None:
    """Return what mapping costs over a conversation: its mean, and its slope by turn.

    Native minus mapped; for a conversation that passes back and forth, under "alternate", the
    alternation in which both read everything minus the mapped one. None where nothing is
    asked in turns.
    """
    if not scores.labels or "turn" not in scores.labels[0] or not has_accuracy(scores):
        return None
    found = _loss_by_turn(scores, "native", "mapped", seed)
    if "alternate" in scores.arms:
        found["alternate"] = _loss_by_turn(scores, "alternate_native", "alternate", seed)
    return found


def _loss_by_turn(scores: Scores, better: str, worse: str, seed: int) -> dict[str, Any]:
    """Return mean and least-squares slope over all turns of all conversations."""
    turns = torch.tensor([labels["turn"] for labels in scores.labels], dtype=torch.float64)
    lost = (scores.column("accuracy", better) - scores.column("accuracy", worse)).double()
    columns = torch.stack((turns, turns.square(), lost, turns * lost), 1)
    means = statistics.resampled_means(columns, scores.units, seed=seed)
    turn, square, loss, product = means.unbind(1)
    slope = (product - turn * loss) / (square - turn.square())
    found = {"mean": statistics.interval(loss), "slope": statistics.interval(slope)}
    return {name: part.point for name, part in found.items()} | {
        "intervals": {name: ends(part) for name, part in found.items()}
    }
