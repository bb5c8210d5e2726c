"""How what `kvmap fit` did, and what quality costs, is laid out as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvmap.cli.output import amount, figure, table

if TYPE_CHECKING:
    from kvmap.fit.frontier import Point
    from kvmap.fit_pair import FitReport


FRONTIER_NOTE = (
    "* none cheaper is better; cost is map and tail over the target's own work on these tokens "
    "(above 1 the target had better read), KL in nats a token on held-out sequences"
)


def frontier(points: Sequence[Point]) -> str:
    """Lay out candidates, cheapest first, with a star at those that none cheaper beats."""
    rows = [
        (
            "*" if p.best else "",
            p.recipe.options.heads,
            p.recipe.options.joint,
            p.recipe.options.anchor,
            p.recipe.options.lookback,
            ",".join(map(str, p.recipe.options.lookback_layers)),
            p.recipe.k,
            "full" if p.recipe.rank is None else f"+{p.recipe.rank:.0%} error",
            p.recipe.options.native_tail,
            p.parameters,
            p.cost,
            p.milliseconds,
            p.divergence,
        )
        for p in points
    ]
    inside = ("heads", "joint", "anchor", "lookback", "of layers", "k", "rank", "tail")
    head = ("frontier", *inside, "parameters", "cost", "ms", "KL")
    return f"{table(head, rows)}\n{FRONTIER_NOTE}"


def candidate(points: Sequence[Point], done: int, total: int) -> str:
    """Say in one line what came of a candidate, with each native tail."""
    recipe = points[0].recipe
    options = recipe.options
    inputs = [name for name in ("joint", "anchor") if getattr(options, name)]
    if options.lookback:
        late = ",".join(map(str, options.lookback_layers))
        inputs.append(f"lookback {options.lookback} of layers {late}")
    rank = [] if recipe.rank is None else [f"rank +{recipe.rank:.0%} error"]
    made = ", ".join([f"{options.heads} heads", *inputs, f"k {recipe.k}", *rank])
    found = ", ".join(
        f"KL {figure(p.divergence)}, {p.milliseconds:.1f} ms with a tail of "
        f"{p.recipe.options.native_tail}"
        for p in points
    )
    return f"{done} of {total}: {made}: {found}"


def notes(report: FitReport) -> Iterator[str]:
    """Yield what a fit has to say of itself, line by line."""
    from kvmap.fit.accuracy import rounded_away
    from kvmap.fit.choice import LOW_ROWS_PER_INPUT

    made = report.cmap.provenance
    if report.reused:
        yield f"reused: {', '.join(report.reused)}"
    for kind in ("key", "value"):
        train, held_out = (made["r2"][split][kind] for split in ("train", "held_out"))
        yield f"R² of {kind}s: {figure(held_out)} held out, {figure(train)} in sample"
    if rounded_away(report.cmap):
        wider = made["collect"].get("products") == "float32"
        ways = f"{'collect with --products float64, or ' if wider else ''}give a larger --ridge"
        yield (
            "warning: an R² is more than 1, so the moments lack digits for so small a ridge; "
            f"{ways}"
        )
    if made["recipe"]["assign"] == "best" and _by_ratio(made):
        yield (
            "heads are paired by the ratio of their numbers: the calibration keeps moments of "
            "matched heads, which say nothing of other pairs; collect with --heads all"
        )
    ratio = made["rows_per_input"]
    yield (
        f"k = {report.k}, {report.cmap.parameters} parameters "
        f"({amount(4 * report.cmap.parameters)}), {ratio:.1f} rows per input"
    )
    if ratio < LOW_ROWS_PER_INPUT:
        smaller = " or a smaller -k" if report.k > 1 else ""
        yield (
            f"warning: fewer than {LOW_ROWS_PER_INPUT:.0f} rows per input; in-sample R² says "
            f"nothing here: give more --sequences{smaller}"
        )


def _by_ratio(made: dict[str, Any]) -> bool:
    """Say whether matched heads could not be scored, as of a map's provenance."""
    matched = made["recipe"]["options"]["heads"] == "matched"
    return matched and made["collect"]["heads"] == "matched"
