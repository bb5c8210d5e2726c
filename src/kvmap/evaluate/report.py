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
from kvmap.columns import KINDS
from kvmap.evaluate import shift, statistics, summary
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


def extent(figures: dict[str, Any]) -> str:
    """Say on how much a report rests, and what its intervals are."""
    few = statistics.too_few(figures["documents"])
    count = f"{figures['n']} questions on {figures['documents']} documents"
    return f"{count}; {few or 'intervals 95 %, over documents'}"


def conclusion(figures: dict[str, Any]) -> str:
    """Return the verdict with what it lacks, and with whether its text is held out."""
    lacking = f": {figures['unsure']}" if figures["unsure"] else ""
    if held_out(figures):
        return f"{figures['verdict']}{lacking}"
    mark = ";" if lacking else ","
    return f"{figures['verdict']}{lacking}{mark} on text the calibration has read: not held out"


def held_out(figures: dict[str, Any]) -> bool:
    """Say whether no text is known to have been read by the map's calibration too."""
    return not figures["about"].get("read_in_calibration")


def report_files(path: Path) -> tuple[Path, Path]:
    """Return where a report lies and where its figures do; `path` names either."""
    whole = path.with_suffix(".safetensors") if path.suffix == ".json" else path
    return whole, path.with_suffix(".json")


def build(
    parts: Sequence[Scores],
    found: Diagnostics | None,
    about: dict[str, Any],
    seed: int = 0,
    fitted: Mapping[str, Tensor] | None = None,
) -> Report:
    """Make a report of all tasks' scores and, where there are any, the diagnostics.

    Args:
        about: Provenance: which map, models and options.
        fitted: R² tables that the map keeps of its fit.
    """
    figures = summary.summarise_all(parts, seed)
    figures["cosine"] = cosine_figures(found, seed)
    figures["diagnostics"], tensors = None, {}
    if found is not None:
        tables = r2_tables(found, fitted or {})
        known = (about.get("provenance") or {}).get("r2")
        figures["diagnostics"] = diagnostic_figures(found, tables, known)
        tensors = {f"diagnostics.{name}": getattr(found, name) for name in ARRAYS}
        tensors |= {f"r2.{name}": table for name, table in tables.items()}
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


def r2_tables(found: Diagnostics, fitted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return R² by "split.kind"; one without variance to explain is left at 0."""
    here = {"evaluation.key": found.key_r2, "evaluation.value": found.value_r2}
    return dict(fitted) | {n: table.nan_to_num(0.0, neginf=0.0) for n, table in here.items()}


def diagnostic_figures(
    found: Diagnostics, tables: Mapping[str, Tensor], known: dict[str, Any] | None
) -> dict[str, Any]:
    """Return each diagnostic by layer, mean over heads.

    Args:
        tables: R² of the text fitted on, held out and evaluated on; see `shift`.
        known: Means of the first two, where a map keeps no more.
    """
    return {
        "r2": {
            "mean": (known or {}) | shift.means(tables, found.mapped),
            "by_layer": shift.by_layer(tables),
            "fall": {kind: shift.fall(tables, kind) for kind in KINDS},
        },
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
