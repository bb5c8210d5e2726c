"""`kvmap report`: reports side by side."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvmap.cli import options
from kvmap.cli.layout import RATIOS, spread
from kvmap.cli.output import Output, figure, printable_data, table

EXAMPLES = (
    "kvmap report paper.report cachebridge.report kvmap.report",
    "kvmap report s-l.report m-l.report --json",
)


def run(
    reports: Annotated[
        list[Path], typer.Argument(metavar="REPORT", help="Reports that `kvmap eval` wrote.")
    ],
    as_json: options.Json = False,
) -> None:
    """Set reports side by side."""
    from kvmap.evaluate.report import Report
    from kvmap.header import sound, without_nan

    loaded = [(str(path), Report.load(path).figures) for path in reports]
    spelt = []
    for path, one in zip(reports, loaded, strict=True):
        with sound(path, "report"):
            spelt += printable_data([one])
            compare(spelt[-1:])
            without_nan(one)
    document = {"reports": [{"report": name, **figures} for name, figures in loaded]}
    Output(as_json).document(document, lambda: compare(spelt))


def compare(reports: list[tuple[str, dict[str, Any]]]) -> str:
    """Lay reports out as columns, their figures as rows."""
    arms = dict.fromkeys(arm for _, figures in reports for arm in figures["arms"])
    rows: list[list[Any]] = [
        ["pair", *(f"{f['about']['source']} → {f['about']['target']}" for _, f in reports)],
        ["recipe", *(_recipe(f["about"]) for _, f in reports)],
        ["k", *(str(f["about"].get("k", "-")) for _, f in reports)],
        ["tasks", *(",".join(f["tasks"]) for _, f in reports)],
        ["n", *(_extent(f) for _, f in reports)],
        ["verdict", *(_verdict(f) for _, f in reports)],
    ]
    for name, label in (*RATIOS.items(), ("margin", "margin")):
        rows.append([label, *(spread(f[name], f["intervals"][name]) for _, f in reports)])
    rows += [[f"cosine {part}", *(figure(f["cosine"][part]) for _, f in reports)] for part in ENDS]
    for measure in ("accuracy", "nll", "kl"):
        for arm in arms:
            rows.append([f"{arm} {measure}", *(_of(f, arm, measure) for _, f in reports)])
    return table(["", *(name for name, _ in reports)], [row for row in rows if any(_said(row))])


ENDS = ("mean", "worst")


def _extent(figures: dict[str, Any]) -> str:
    from kvmap.evaluate.statistics import too_few

    few = " (too few for intervals)" if too_few(figures["documents"]) else ""
    return f"{figures['n']} on {figures['documents']}{few}"


def _verdict(figures: dict[str, Any]) -> str:
    """Return the verdict, and whether its text is known not to be held out."""
    from kvmap.evaluate.report import held_out

    return figures["verdict"] if held_out(figures) else f"{figures['verdict']} (not held out)"


def _recipe(about: dict[str, Any]) -> str:
    from kvmap.fit.recipes import preset_of

    return preset_of(about.get("provenance") or {}) or "-"


def _of(figures: dict[str, Any], arm: str, measure: str) -> str:
    return figure(figures["arms"].get(arm, {}).get(measure))


def _said(row: list[Any]) -> list[bool]:
    return [cell != "-" for cell in row[1:]]
