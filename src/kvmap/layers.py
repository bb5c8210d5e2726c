"""Score every source layer for every target layer, and choose.

The score of a pair is the R² of a single-layer, head-matched least-squares probe, averaged
over KV heads and over K and V (arXiv 2608.03893, §3). Scores are computed on the training
moments and on held-out sequences apart.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmap import artifacts, header
from kvmap.columns import KINDS, Block, head_assignment
from kvmap.geometry import Geometry
from kvmap.moments import Moments
from kvmap.ridge import explained_share, fitted_error, r2, solve

# A probe has D inputs only, so this ridge merely keeps it well posed.
PROBE_RIDGE = 1e-6


@dataclass(frozen=True)
class LayerScores:
    """R² of single-layer probes, [L_t, L_s] each, by kind and split."""

    train: dict[str, Tensor]
    held_out: dict[str, Tensor]

    def mean(self, split: str = "held_out") -> Tensor:
        """Return the mean over K and V, [L_t, L_s]."""
        tables = getattr(self, split)
        return (tables["key"] + tables["value"]) / 2


def score_layers(
    train: Moments, held_out: Moments, source: Geometry, target: Geometry
) -> LayerScores:
    """Probe all pairs of layers."""
    tables = {kind: _probe(train, held_out, source, target, kind) for kind in KINDS}
    return LayerScores(
        {kind: tables[kind][0] for kind in KINDS},
        {kind: tables[kind][1] for kind in KINDS},
    )


def _probe(
    train: Moments, held_out: Moments, source: Geometry, target: Geometry, kind: str
) -> tuple[Tensor, Tensor]:
    """Return train and held-out R² [L_t, L_s] of one kind, averaged over target heads."""
    tables = torch.zeros(2, target.layers, source.layers, dtype=torch.float64)
    for head, source_head in enumerate(head_assignment(source.kv_heads, target.kv_heads)):
        outputs = [Block("target", kind, layer, head) for layer in range(target.layers)]
        for layer in range(source.layers):
            inputs = [Block("source", kind, layer, source_head)]
            fitted = train.covariance(inputs, outputs)
            solution = solve(fitted, PROBE_RIDGE)
            unseen = held_out.covariance(inputs, outputs)
            own = fitted_error(fitted, solution[0], PROBE_RIDGE)
            tables[0, :, layer] += explained_share(own, fitted, target.head_size).cpu()
            tables[1, :, layer] += r2(unseen, *solution, target.head_size).cpu()
    tables /= target.kv_heads
    return tables[0], tables[1]


def are_layers_of(layers: tuple[tuple[int, ...], ...], source: Geometry, target: Geometry) -> bool:
    """Say whether each target layer reads source layers, one at least, of a pair."""
    return len(layers) == target.layers and all(
        row and min(row) >= 0 and max(row) < source.layers for row in layers
    )


def choose_top(scores: LayerScores, k: int) -> tuple[tuple[int, ...], ...]:
    """Return for each target layer the k source layers of best training score, in layer order."""
    best = scores.mean("train").topk(min(k, scores.mean("train").shape[1]), dim=1).indices
    return tuple(tuple(sorted(row.tolist())) for row in best)


def choose_greedy(
    source_layers: int,
    target_layers: int,
    k: int,
    held_out_r2: Callable[[int, tuple[int, ...]], float],
) -> tuple[tuple[int, ...], ...]:
    """Add to each target layer the source layer that helps most, until k or until none helps.

    Args:
        held_out_r2: R² of a target layer fitted from some source layers, on held-out rows.
    """
    chosen = []
    for layer in range(target_layers):
        mine: tuple[int, ...] = ()
        best = float("-inf")
        while len(mine) < min(k, source_layers):
            options = [tuple(sorted((*mine, s))) for s in range(source_layers) if s not in mine]
            scored = max((held_out_r2(layer, option), option) for option in options)
            if scored[0] <= best:
                break
            best, mine = scored
        chosen.append(mine)
    return tuple(chosen)


def save_layers(
    path: Path | str,
    scores: LayerScores,
    layers: tuple[tuple[int, ...], ...],
    metadata: dict[str, Any],
) -> Path:
    """Write R² tables and the choice as an artifact of kind "layers"."""
    tensors = {
        f"{split}.{kind}": getattr(scores, split)[kind]
        for split in ("train", "held_out")
        for kind in KINDS
    }
    return artifacts.write(
        path, "layers", tensors, metadata | {"layers": [list(row) for row in layers]}
    )


def load_layers(
    path: Path | str,
) -> tuple[LayerScores, tuple[tuple[int, ...], ...], dict[str, Any]]:
    """Read R² tables, the choice and what it was made from.

    Raises:
        UsageError: The file is no sound choice of layers.
    """
    artifact = artifacts.open_artifact(path, "layers")
    tables = [
        {kind: artifact.tensor(f"{split}.{kind}") for kind in KINDS}
        for split in ("train", "held_out")
    ]
    with header.sound(path, "layers"):
        layers = tuple(tuple(map(operator.index, row)) for row in artifact.metadata["layers"])
        targets, sources = tables[0]["key"].shape
        if {tensor.shape for table in tables for tensor in table.values()} != {(targets, sources)}:
            raise ValueError("the tables differ in shape")
        if len(layers) != targets or not all(0 <= s < sources for row in layers for s in row):
            raise ValueError("the choice is not of the tables' layers")
        if not all(row and len(set(row)) == len(row) for row in layers):
            raise ValueError("a target layer reads nothing, or one source layer twice")
        if operator.index(artifact.metadata["k"]) != max(map(len, layers)):
            raise ValueError("k is not the number of layers read")
        tried_scores(artifact.metadata)
    return LayerScores(*tables), layers, artifact.metadata


def tried_scores(metadata: dict[str, Any]) -> dict[int, float]:
    """Return the held-out R² of every k that was tried, of those that have one.

    Raises:
        ValueError: Or whatever else a record of another form raises.
    """
    tried = metadata.get("tried", {})
    return {int(k): float(r2) for k, r2 in tried.items() if r2 is not None}
