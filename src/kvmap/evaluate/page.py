"""A report as one self-contained page: figures as tables, pictures inline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from kvmap.evaluate.pictures import pictures
from kvmap.evaluate.report import Report, conclusion, extent
from kvmap.evaluate.statistics import WILSON_NOTE, by_wilson

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
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="verdict">{escape(conclusion(figures))}</p>',
        f"<p>{escape(extent(figures))}</p>",
        _arms(figures),
        _ratios(figures),
        *pictures(report),
        *_groups(figures),
        f"<h2>Provenance</h2><pre>{escape(json.dumps(about, indent=2, default=str))}</pre>",
    ]
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(body)}</body></html>"


def _arms(figures: dict[str, Any]) -> str:
    names = ("accuracy", "nll", "kl", "kl_p95", "top1")
    rows, note = [], ""
    for arm, found in figures["arms"].items():
        row = [_figure(found.get(name), found["intervals"].get(name)) for name in names]
        if by_wilson(found["accuracy"]):
            row[0], note = f"{row[0]}*", f"<p>* {escape(WILSON_NOTE)}</p>"
        rows.append([arm, *row])
    return _table(("arm", *names), rows) + note


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
