"""A report: figures as JSON, and arrays by item, token, layer and head beside them.

Two files: `REPORT.safetensors` (kind "report") holds everything, its header the figures;
`REPORT.json` holds the figures alone, under the keys other programs rely on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmap import artifacts, header
from kvmap.evaluate import statistics, summary
from kvmap.evaluate.diagnostics import Diagnostics
from kvmap.evaluate.scores import Scores

ARRAYS = ("cosine", "key_concentration", "value_concentration", "first_mass", "first_error")


@dataclass(frozen=True, eq=False)
class Report:
    """What an evaluation found.

    Attributes:
        figures: JSON data: arms, ratios, tests, verdict, cosine, tasks, provenance.
        tensors: Arrays behind them.
        labels: Per task, the labels of its probes.
    """

    figures: dict[str, Any]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    labels: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """One of `statistics.VERDICTS`."""
        return self.figures["verdict"]

    def save(self, path: Path) -> Path:
        """Write both files and return the first; a path that ends in .json names the second."""
        path, figures_path = report_files(path)
        metadata = artifacts.without_nan({"figures": self.figures, "labels": dict(self.labels)})
        written = artifacts.write(path, "report", self.tensors, metadata)
        artifacts.write_json(figures_path, {"kind": "report", **self.figures})
        return written

    @classmethod
    def load(cls, path: Path | str) -> Report:
        """Read a report.

        Raises:
            UsageError: The file is no sound report.
        """
        artifact = artifacts.open_artifact(path, "report")
        metadata = artifact.metadata
        with header.sound(path, "report"):
            return cls(dict(metadata["figures"]), artifact.tensors(), dict(metadata["labels"]))


def report_files(path: Path) -> tuple[Path, Path]:
    """Return where a report lies and where its figures do; `path` names either."""
    whole = path.with_suffix(".safetensors") if path.suffix == ".json" else path
    return whole, path.with_suffix(".json")


def build(
    parts: Sequence[Scores], found: Diagnostics | None, about: dict[str, Any], seed: int = 0
) -> Report:
    """Make a report of all tasks' scores and, where there are any, the diagnostics.

    Args:
        about: Provenance: which map, models and options.
    """
    figures = summary.summarise_all(parts, seed)
    figures["cosine"] = cosine_figures(found, seed)
    fitted = (about.get("provenance") or {}).get("r2")
    figures["diagnostics"] = None if found is None else diagnostic_figures(found, fitted)
    tensors = {} if found is None else diagnostic_arrays(found)
    for part in parts:
        tensors |= _arrays(part)
    labels = {part.task: list(part.labels) for part in parts}
    return Report(figures | {"about": about}, tensors, labels)


def _arrays(scores: Scores) -> dict[str, Tensor]:
    """Return a task's arrays by name; what does not apply is left out, not filled with NaN."""
    made = {
        f"tasks.{scores.task}.units": scores.units,
        f"tasks.{scores.task}.token_rows": scores.token_rows,
    }
    for measure in summary.MEASURES:
        for arm in scores.arms:
            column = scores.column(measure, arm)
            if len(column) and column.isfinite().all():
                made[f"tasks.{scores.task}.{measure}.{arm}"] = column.clone()
    return made


def cosine_figures(found: Diagnostics | None, seed: int = 0) -> dict[str, Any]:
    """Return the attention-output cosine: mean with interval, worst layer, worst head."""
    if found is None:
        return {"mean": None, "worst": None}
    by_layer = found.cosine.mean(1)
    mapped = by_layer[list(found.mapped)]
    units = torch.arange(len(found.document_cosine))
    samples = statistics.resampled_means(found.document_cosine[:, None], units, seed=seed)[:, 0]
    interval = statistics.interval(samples)
    layer, head = found.worst_head
    return {
        "mean": mapped.mean().item(),
        "worst": mapped.min().item(),
        "worst_layer": found.worst_layer,
        "worst_head": {"layer": layer, "head": head, "cosine": found.cosine.min().item()},
        "by_layer": by_layer.tolist(),
        "interval": [interval.lower, interval.upper],
        "documents": len(found.document_cosine),
    }


def diagnostic_figures(found: Diagnostics, fitted: dict[str, Any] | None) -> dict[str, Any]:
    """Return each diagnostic by layer, mean over heads.

    Args:
        fitted: The map's own R² on the text it was fitted on and on held-out text: where R² on
            the evaluation's documents is lower, the domain has shifted.
    """
    by_layer = {"key": found.key_r2.mean(1), "value": found.value_r2.mean(1)}
    here = {kind: rows[list(found.mapped)].mean().item() for kind, rows in by_layer.items()}
    return {
        "r2": {kind: rows.tolist() for kind, rows in by_layer.items()}
        | {"mean": {**(fitted or {}), "evaluation": here}},
        "concentration": {
            "key": found.key_concentration.mean(1).tolist(),
            "value": found.value_concentration.mean(1).tolist(),
        },
        "first_tokens": {
            "attention": found.first_mass.mean(1).tolist(),
            "key_error": found.first_error[:, 0].tolist(),
            "value_error": found.first_error[:, 1].tolist(),
        },
    }


def diagnostic_arrays(found: Diagnostics) -> dict[str, Tensor]:
    """Return the arrays by layer and head; an R² without variance to explain is left at 0."""
    made = {f"diagnostics.{name}": getattr(found, name) for name in ARRAYS}
    for name in ("key_r2", "value_r2"):
        made[f"diagnostics.{name}"] = getattr(found, name).nan_to_num(0.0, neginf=0.0)
    return made
