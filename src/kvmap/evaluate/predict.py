"""Will a pair work? A cheap score before any task runs, and the retention it suggests.

Attention-output cosine on a few documents is what predicts retention (r = +0.57 over twelve
pairs in arXiv 2608.03893, where R² did not). The line from one to the other is fitted on the
maps that were evaluated here so far; how many those are is always said, and with fewer than
`MINIMUM_MAPS` nothing is predicted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvmap.evaluate import runner
from kvmap.evaluate.arms import Pair
from kvmap.evaluate.diagnostics import diagnose
from kvmap.evaluate.items import Task
from kvmap.evaluate.report import held_out

MINIMUM_MAPS = 4
DOCUMENTS = 4


@dataclass(frozen=True)
class Seen:
    """A map evaluated before: its cosine and what it retained."""

    map_sha256: str
    cosine: float
    retention: float


def predict(pair: Pair, task: Task, seen: Sequence[Seen]) -> dict[str, Any]:
    """Return cosine and KL of a few documents, and the retention they suggest, as plain data.

    Args:
        task: Running text; its first documents are read.
        seen: Maps evaluated so far.
    """
    items = task.items[:DOCUMENTS]
    found = diagnose(pair, [item.context for item in items])
    few = Task(task.name, items, task.chance)
    scores = runner.run_task(pair, few, arms=("native", "mapped"))
    cosine = found.document_cosine.mean().item()
    return {
        "cosine": cosine,
        "kl": scores.column("kl", "mapped").mean().item(),
        "documents": len(items),
        **suggest(cosine, seen),
    }


def suggest(cosine: float, seen: Sequence[Seen]) -> dict[str, Any]:
    """Return the retention that a least-squares line suggests, and how far off it has been.

    `error` is the root mean square of leaving each map out; both are None with too few maps.
    """
    known = {one.map_sha256: one for one in seen}
    points = [(one.cosine, one.retention) for one in known.values()]
    spread = len({x for x, _ in points}) > 2
    if len(points) < MINIMUM_MAPS or not spread:
        return {"retention": None, "error": None, "maps": len(points)}
    misses = [_line(points[:i] + points[i + 1 :], x) - y for i, (x, y) in enumerate(points)]
    error = (sum(miss * miss for miss in misses) / len(misses)) ** 0.5
    return {"retention": _line(points, cosine), "error": error, "maps": len(points)}


def _line(points: Sequence[tuple[float, float]], at: float) -> float:
    x, y = torch.tensor(points, dtype=torch.float64).unbind(1)
    centred = x - x.mean()
    slope = (centred * y).sum() / centred.square().sum()
    return (y.mean() + slope * (at - x.mean())).item()


def remember(path: Path, figures: dict[str, Any]) -> None:
    """Add an evaluation to the maps seen, where it says a retention and a cosine of new text."""
    retention, cosine = figures["retention"], figures["cosine"]["mean"]
    unsure = figures["verdict"] == "not enough items" or not held_out(figures)
    if retention is None or cosine is None or unsure:
        return
    entry = Seen(figures["about"]["map_sha256"], cosine, retention)
    with path.open("a") as file:
        file.write(json.dumps(entry.__dict__) + "\n")


def recall(path: Path) -> list[Seen]:
    """Return the maps seen so far; a line that is not sound is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(Seen(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found
