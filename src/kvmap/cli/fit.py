"""`kvmap fit`: a map, from a calibration or from the names of two models."""

from pathlib import Path
from typing import Annotated

import typer

from kvmap.cli import inputs, options
from kvmap.cli.output import Output, amount, figure
from kvmap.errors import UsageError

EXAMPLES = (
    "kvmap fit tiny-m tiny-l -o m-l.map",
    "kvmap fit m-l.calib --recipe paper --layers m-l.layers --ridge 1e-3 -o paper.map",
)


def run(
    source: Annotated[
        str, typer.Argument(metavar="CALIB|SOURCE", help="A calibration, or the source model.")
    ],
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="The target model.")
    ] = None,
    output: options.output("the map", "MAP") = None,
    layers: Annotated[
        Path | None,
        typer.Option("--layers", metavar="LAYERS", help="A choice by `kvmap select-layers`."),
    ] = None,
    recipe: options.Recipe = None,
    k: options.K = None,
    method: options.LayerMethod = None,
    ridge: Annotated[
        str | None,
        typer.Option("--ridge", metavar="X|auto", help="Relative penalty; auto by held-out error."),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            "--heads", metavar="all|matched", help="Source heads that each target head reads."
        ),
    ] = None,
    joint: Annotated[
        bool | None, typer.Option("--joint/--no-joint", help="Keys and values from both.")
    ] = None,
    anchor: Annotated[
        bool | None, typer.Option("--anchor/--no-anchor", help="Read the target's layer 0 too.")
    ] = None,
    exact_first: Annotated[
        bool | None,
        typer.Option("--exact-first/--no-exact-first", help="Compute the target's layer 0."),
    ] = None,
    native_head: Annotated[
        int | None,
        typer.Option("--native-head", metavar="N", help="First tokens the target runs itself."),
    ] = None,
    native_tail: Annotated[
        int | None,
        typer.Option("--native-tail", metavar="N", help="Last tokens it runs itself, from 1."),
    ] = None,
    dataset: options.Dataset = None,
    sequences: options.Sequences = None,
    length: options.Length = None,
    stride: options.Stride = None,
    held_out: options.HeldOut = None,
    seed: options.Seed = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Fit a map in closed form, doing what must come before and reusing what is there."""
    from kvmap.artifacts import refuse_overwrite
    from kvmap.calibration import Calibration
    from kvmap.collect import CollectOptions
    from kvmap.pair import FitRequest, Loading, TextOptions, fit_calibration, fit_pair

    out = Output(as_json, quiet)
    if output is not None:
        refuse_overwrite(output, force)
    parts = {
        "heads": inputs.one_of("--heads", heads, "all", "matched"),
        "joint": joint,
        "anchor": anchor,
        "exact_first": exact_first,
        "native_head": inputs.at_least("--native-head", native_head, 0),
        "native_tail": inputs.at_least("--native-tail", native_tail, 1),
    }
    wanted = {"k": inputs.count_or_auto("-k", k), "ridge": inputs.ridge_or_auto(ridge)}
    request = FitRequest(
        inputs.edited_recipe(recipe, wanted, parts),
        inputs.one_of("--method", method, "top", "greedy") or "top",
        layers,
        output,
    )
    text = {"dataset": dataset, "sequences": sequences, "length": length, "seed": seed}
    kept = {"stride": stride, "held_out": held_out}
    with out.progress() as progress:
        if target is None:
            _refuse_text(text | kept)
            report = fit_calibration(Calibration.open(source), request, progress)
        else:
            report = fit_pair(
                (source, target),
                inputs.given(TextOptions, **text),
                inputs.given(CollectOptions, **kept),
                request,
                inputs.given(Loading, device=device, dtype=dtype),
                progress,
            )
    _describe(out, report)
    out.result(report.path, report.to_json())


def _refuse_text(asked) -> None:
    """Refuse options of `collect` beside a calibration, whose text is what it is."""
    found = [f"--{name.replace('_', '-')}" for name, value in asked.items() if value is not None]
    if found:
        raise UsageError(
            f"{found[0]} is for two models, found a calibration alone; "
            "run `kvmap fit SOURCE TARGET` or leave it out"
        )


def _describe(out: Output, report) -> None:
    from kvmap.pipeline import LOW_ROWS_PER_INPUT

    made = report.cmap.provenance
    if report.reused:
        out.note(f"reused: {', '.join(report.reused)}")
    for kind in ("key", "value"):
        train, held_out = (made["r2"][split][kind] for split in ("train", "held_out"))
        out.note(f"R² of {kind}s: {figure(held_out)} held out, {figure(train)} in sample")
    ratio = made["rows_per_input"]
    out.note(
        f"k = {report.k}, {report.cmap.parameters} parameters "
        f"({amount(4 * report.cmap.parameters)}), {ratio:.1f} rows per input"
    )
    if ratio < LOW_ROWS_PER_INPUT:
        out.note(
            f"warning: fewer than {LOW_ROWS_PER_INPUT:.0f} rows per input; in-sample R² says "
            "nothing here: give more --sequences or a smaller -k"
        )
