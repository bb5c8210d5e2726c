"""A report as one self-contained page: figures as tables, pictures inline as SVG.

Pictures need matplotlib (extra `plot`); without it the page has the tables alone and says so.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from html import escape
from typing import Any

from kvmap.evaluate.report import Report

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
svg { max-width: 100%; height: auto } pre { overflow-x: auto; background: #f6f6f6; padding: 1rem }
.verdict { font-size: 1.3rem; font-weight: 600 }
"""
RATIOS = ("retention", "floor_normalised_retention", "gap_recovered", "gap_recovered_nll", "margin")


def page(report: Report) -> str:
    """Return the page's HTML."""
    figures, about = report.figures, report.figures["about"]
    title = f"{about['source']} → {about['target']}"
    count = f"{figures['n']} questions on {figures['documents']} documents; intervals 95 %"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict">{escape(figures["verdict"])}</p><p>{escape(count)}</p>',
        _arms(figures),
        _ratios(figures),
        *_pictures(report),
        *_groups(figures),
        f"<h2>Provenance</h2><pre>{escape(json.dumps(about, indent=2, default=str))}</pre>",
    ]
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(body)}</body></html>"


def _arms(figures: dict[str, Any]) -> str:
    names = ("accuracy", "nll", "kl", "kl_p95", "top1")
    rows = [
        [arm, *(_figure(found.get(name), found["intervals"].get(name)) for name in names)]
        for arm, found in figures["arms"].items()
    ]
    return _table(("arm", *names), rows)


def _ratios(figures: dict[str, Any]) -> str:
    rows = []
    for name in RATIOS:
        value = _figure(figures[name], figures["intervals"][name])
        label = f"margin over {figures['margin_control']}" if name == "margin" else name
        rows.append([label.replace("_", " "), figures["undefined"].get(name) or value])
    return _table(("ratio", "value"), rows)


def _groups(figures: dict[str, Any]) -> Iterator[str]:
    for name, task in figures["tasks"].items():
        for label, found in task["by"].items():
            arms = list(next(iter(found.values()))["arms"])
            rows = [
                [value, str(group["n"])]
                + [_figure(next(iter(group["arms"][arm].values()))) for arm in arms]
                for value, group in found.items()
            ]
            yield f"<h2>{escape(name)} by {escape(label)}</h2>"
            yield _table((label, "n", *arms), rows)


def _figure(value: float | None, ends: list[float] | None = None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" + (f" [{ends[0]:.3f}, {ends[1]:.3f}]" if ends else "")


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    cells = lambda row, tag: "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in row)  # noqa: E731
    lines = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table><tr>{cells(head, 'th')}</tr>{lines}</table>"


def _pictures(report: Report) -> Iterator[str]:
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
        if f"diagnostics.{kind}_r2" in tensors:
            table = tensors[f"diagnostics.{kind}_r2"].tolist()
            yield f"<h2>R² of {kind}s</h2>" + _heat(table, "KV head", "layer", (0, 1))
    if "diagnostics.cosine" in tensors:
        yield "<h2>Attention-output cosine</h2>"
        yield _heat(tensors["diagnostics.cosine"].tolist(), "query head", "layer", (0, 1))
    for name, task in figures["tasks"].items():
        if "turn" in task["by"]:
            yield f"<h2>{escape(name)} by turn</h2>" + _curves(task["by"]["turn"])
        if {"depth", "length"} <= set(task["by"]):
            yield f"<h2>{escape(name)}: mapped, by depth and length</h2>" + _grid(report, name)


def _bars(figures: dict[str, Any]) -> str:
    measure = figures["score"]
    known = {a: f for a, f in figures["arms"].items() if f[measure] is not None}
    values = [found[measure] for found in known.values()]
    ends = [found["intervals"][measure] for found in known.values()]
    below = [max(0, v - low) for v, (low, _) in zip(values, ends, strict=True)]
    above = [max(0, high - v) for v, (_, high) in zip(values, ends, strict=True)]

    def draw(axes: Any) -> None:
        axes.bar(list(known), values, yerr=[below, above], capsize=3)
        axes.set_ylabel("nats per token" if measure == "nll" else measure)
        axes.tick_params(axis="x", rotation=30)

    return _svg(draw)


def _heat(
    table: list[list[float]],
    across: str,
    down: str,
    limits: tuple[float, float],
    ticks: tuple[list[str], list[str]] | None = None,
) -> str:
    def draw(axes: Any) -> None:
        picture = axes.imshow(table, aspect="auto", vmin=limits[0], vmax=limits[1])
        axes.set_xlabel(across)
        axes.set_ylabel(down)
        if ticks:
            axes.set_xticks(range(len(ticks[0])), ticks[0])
            axes.set_yticks(range(len(ticks[1])), ticks[1])
        axes.figure.colorbar(picture, ax=axes)

    return _svg(draw)


def _curves(by_turn: dict[str, Any]) -> str:
    def draw(axes: Any) -> None:
        for arm in ("native", "mapped", "source", "wrong_document"):
            values = [next(iter(group["arms"][arm].values())) for group in by_turn.values()]
            axes.plot(list(by_turn), values, marker="o", label=arm)
        axes.set_xlabel("turn")
        axes.set_ylabel("accuracy or F1")
        axes.legend()

    return _svg(draw)


def _grid(report: Report, task: str) -> str:
    """Draw the mapped arm's accuracy over depth and length."""
    right = report.tensors[f"tasks.{task}.accuracy.mapped"].tolist()
    cells: dict[tuple[float, float], list[float]] = {}
    for labels, value in zip(report.labels[task], right, strict=True):
        cells.setdefault((labels["length"], labels["depth"]), []).append(value)
    lengths, depths = (sorted({cell[i] for cell in cells}) for i in (0, 1))
    mean = lambda values: sum(values) / len(values) if values else float("nan")  # noqa: E731
    table = [[mean(cells.get((length, depth), [])) for length in lengths] for depth in depths]
    ticks = ([str(length) for length in lengths], [f"{depth:.0%}" for depth in depths])
    return _heat(table, "length in tokens", "depth", (0, 1), ticks)


def _svg(draw: Any) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    draw(figure.subplots())
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
