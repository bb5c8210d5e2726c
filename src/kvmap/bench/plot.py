"""Draw latency by context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvmap.errors import UsageError

LINES = {
    "target_prefill_seconds": "target's own prefill",
    "handoff_seconds": "handoff",
    "map_seconds": "map alone",
    "source_prefill_seconds": "source's prefill",
}


def check_plotting() -> None:
    """Check that a plot can be drawn, before any work.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "--plot needs matplotlib, which is not installed; run `pip install 'kvmap[plot]'`"
        ) from error


def plot(contexts: list[dict[str, Any]], path: Path) -> Path:
    """Draw the medians of a report's contexts, one panel per pair and recipe, as an image."""
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for one in contexts:
        panels.setdefault((one["source"], one["target"], one["recipe"] or "map"), []).append(one)
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for at, ((source, target, recipe), rows) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), at + 1)
        for key, label in LINES.items():
            axes.loglog([r["tokens"] for r in rows], [r[key] for r in rows], "o-", label=label)
        axes.set(title=f"{source} to {target}, {recipe}", xlabel="tokens", ylabel="seconds")
        axes.legend()
    figure.savefig(path)
    return path
