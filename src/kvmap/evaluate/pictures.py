"""A report's pictures as inline SVG: they need matplotlib (extra `plot`), and say so without it."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from html import escape
from typing import Any

from torch import Tensor

from kvmap.evaluate import alternate
from kvmap.evaluate.report import Report

TEXTS = {"train": "in sample", "held_out": "held out", "evaluation": "these documents"}
CURVES = ("native", "mapped", "source", "wrong_document", *alternate.ARMS)


def pictures(report: Report) -> Iterator[str]:
    """Yield headings and pictures of all that a report can be pictured by."""
    try:
        import matplotlib
    except ImportError:
        yield "<p>Pictures need matplotlib: <code>pip install 'kvmap[plot]'</code>.</p>"
        return
    matplotlib.use("svg")
    # Ids and dates would make equal reports differ.
    with matplotlib.rc_context({"svg.hashsalt": "kvmap", "svg.fonttype": "none"}):
        yield from _draw(report)


def _draw(report: Report) -> Iterator[str]:
    figures, tensors = report.figures, report.tensors
    yield "<h2>Arms</h2>" + _bars(figures)
    for kind in ("key", "value"):
        found = {title: f"r2.{split}.{kind}" for split, title in TEXTS.items()}
        tables = {title: tensors[name] for title, name in found.items() if name in tensors}
        if tables:
            yield f"<h2>R² of {kind}s</h2>" + _heats(tables, ("KV head", "layer"), _range(tables))
    if "diagnostics.cosine" in tensors:
        cosine = {"these documents": tensors["diagnostics.cosine"]}
        yield "<h2>Attention-output cosine</h2>"
        yield _heats(cosine, ("query head", "layer"), _range(cosine))
    for name, task in figures["tasks"].items():
        if "turn" in task["by"]:
            yield f"<h2>{escape(name)} by turn</h2>" + _curves(task["by"]["turn"])
        if task["grid"]:
            yield f"<h2>{escape(name)}: mapped, by depth and length</h2>" + _grid(task["grid"])


def _range(tables: dict[str, Tensor]) -> tuple[float, float]:
    """Return the ends of a scale up to 1: what is far below 0 is as good as 0."""
    return max(0.0, min(table.min().item() for table in tables.values())), 1.0


def _bars(figures: dict[str, Any]) -> str:
    measure = figures["score"]
    known = {a: f for a, f in figures["arms"].items() if f[measure] is not None}
    values = [found[measure] for found in known.values()]
    ends = [found["intervals"][measure] for found in known.values()]
    below = [max(0, v - low) for v, (low, _) in zip(values, ends, strict=True)]
    above = [max(0, high - v) for v, (_, high) in zip(values, ends, strict=True)]

    def draw(axes: Any) -> None:
        axes = axes[0]
        axes.bar(list(known), values, yerr=[below, above], capsize=3)
        axes.set_ylabel("nats per token" if measure == "nll" else measure)
        axes.tick_params(axis="x", rotation=30)

    return _svg(draw)


def _heats(
    tables: dict[str, Tensor], axes_names: tuple[str, str], limits: tuple[float, float]
) -> str:
    """Draw tables side by side on one scale of colours; each under its title."""

    def draw(axes: Any) -> None:
        for place, (title, table) in zip(axes, tables.items(), strict=True):
            picture = place.imshow(table.numpy(), aspect="auto", vmin=limits[0], vmax=limits[1])
            place.set_title(title)
            place.set_xlabel(axes_names[0])
            place.set_ylabel(axes_names[1])
            for axis in (place.xaxis, place.yaxis):
                axis.get_major_locator().set_params(integer=True)
        axes[0].figure.colorbar(picture, ax=axes)

    return _svg(draw, len(tables))


def _curves(by_turn: dict[str, Any]) -> str:
    def draw(axes: Any) -> None:
        shown = next(iter(by_turn.values()))["arms"]
        for arm in [arm for arm in CURVES if arm in shown]:
            values = [next(iter(group["arms"][arm].values())) for group in by_turn.values()]
            axes[0].plot(list(by_turn), values, marker="o", label=arm)
        axes[0].set_xlabel("turn")
        axes[0].set_ylabel("accuracy or F1")
        axes[0].legend()

    return _svg(draw)


def _grid(found: dict[str, Any]) -> str:
    """Draw the mapped arm's accuracy over depth and length."""
    lengths, depths = found["lengths"], found["depths"]
    table = [[math.nan if cell is None else cell for cell in row] for row in found["mapped"]]

    def draw(axes: Any) -> None:
        picture = axes[0].imshow(table, aspect="auto", vmin=0, vmax=1)
        axes[0].set_xlabel("length in tokens")
        axes[0].set_ylabel("depth")
        axes[0].set_xticks(range(len(lengths)), [str(length) for length in lengths])
        axes[0].set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes[0].figure.colorbar(picture, ax=axes)

    return _svg(draw)


def _svg(draw: Any, columns: int = 1) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    draw(figure.subplots(1, columns, squeeze=False)[0])
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
