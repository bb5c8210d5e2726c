"""R² by layer and head on three texts apart: fitted on, held out of the fit, and evaluated on.

The sample that a map was fitted on flatters it; held-out sequences of the same text do not; and
where R² is lower still on the evaluation's documents, the domain has shifted. Tables are
[L_t, H_t] by "split.kind"; an exact layer has 1 and is left out of means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvmap.columns import KINDS

SPLITS = ("train", "held_out", "evaluation")


def by_layer(tables: Mapping[str, Tensor]) -> dict[str, dict[str, list[float]]]:
    """Return means over heads, by split and kind."""
    found: dict[str, dict[str, list[float]]] = {}
    for split, kind, table in _each(tables):
        found.setdefault(split, {})[kind] = table.mean(1).tolist()
    return found


def means(tables: Mapping[str, Tensor], mapped: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return means over mapped layers and heads, by split and kind."""
    found: dict[str, dict[str, float]] = {}
    for split, kind, table in _each(tables):
        found.setdefault(split, {})[kind] = table[list(mapped)].mean().item()
    return found


def worst(table: Tensor) -> dict[str, Any]:
    """Return the head that is predicted worst: its layer, its number and R²."""
    layer, head = divmod(int(table.argmin()), table.shape[1])
    return {"layer": layer, "head": head, "r2": table[layer, head].item()}


def fall(tables: Mapping[str, Tensor], kind: str) -> dict[str, Any] | None:
    """Return the head that loses most from held-out text to the evaluation's; None if none does."""
    before, after = (tables.get(f"{split}.{kind}") for split in ("held_out", "evaluation"))
    if before is None or after is None or not bool((after < before).any()):
        return None
    found = worst(after - before)
    layer, head = found["layer"], found["head"]
    ends = {"held_out": before, "evaluation": after}
    return {"layer": layer, "head": head} | {n: t[layer, head].item() for n, t in ends.items()}


def _each(tables: Mapping[str, Tensor]) -> list[tuple[str, str, Tensor]]:
    return [
        (split, kind, torch.as_tensor(tables[f"{split}.{kind}"]))
        for split in SPLITS
        for kind in KINDS
        if f"{split}.{kind}" in tables
    ]
