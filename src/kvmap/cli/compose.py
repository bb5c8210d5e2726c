"""`kvmap compose`: one map from two that meet in a third model."""

from pathlib import Path
from typing import Annotated

import typer

from kvmap.cli import inputs, options
from kvmap.cli.output import Output, amount, figure

EXAMPLES = (
    "kvmap compose s-m.map m-l.map -o s-l.map",
    "kvmap compose s-m.map m-l.map -o s-l.map --calibration s-l.calib",
)


def run(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="Map from source to hub.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Map from hub to target.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="MAP", help="Where to write the map.")
    ],
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration", metavar="CALIB", help="Of source and target: measure the map on it."
        ),
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Make one map of two linear ones.

    FIRST is fitted with `--no-anchor --no-exact-first`, SECOND with `--lookback 0`. The hub's own
    head and tail are lost.
    """
    from kvmap.artifacts import refuse_overwrite
    from kvmap.calibration import Calibration
    from kvmap.fit.compose import compose
    from kvmap.mapping import CacheMap
    from kvmap.pipeline import measure_accuracy

    out = Output(as_json, quiet)
    inputs.refuse_inputs(output, first, second)
    refuse_overwrite(output, force)
    made = compose(CacheMap.load(first), CacheMap.load(second))
    report = {"map": str(output), "parameters": made.parameters}
    if calibration is not None:
        made = measure_accuracy(made, Calibration.open(calibration))
        report["r2"] = made.provenance["r2"]
        for kind, value in report["r2"]["held_out"].items():
            out.note(f"R² of {kind}s: {figure(value)} held out")
    made.save(output)
    out.note(
        f"{made.source.name} → {made.target.name}: {made.parameters} parameters "
        f"({amount(4 * made.parameters)}); measure it with `kvmap eval {output}`"
    )
    out.result(output, report)
