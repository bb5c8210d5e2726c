"""`kvmap fit`: a map, from a calibration or from the names of two models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvmap.cli import fit_text, ignored, inputs, options, plan
from kvmap.cli.output import Output
from kvmap.errors import UsageError

if TYPE_CHECKING:
    from kvmap.calibration import Calibration
    from kvmap.collect_options import CollectOptions
    from kvmap.collect_pair import Loading, TextOptions
    from kvmap.fit.job import Opener
    from kvmap.fit_pair import FitReport, FitRequest

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
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            metavar="top|greedy|mlp|residual",
            help="One of two things: how layers are chosen, top or greedy, for a linear map; or "
            "which network is fitted instead, mlp or residual, of layers chosen by top. "
            "[default: top]",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights", metavar="none|attention", help="Count rows by how much they are read."
        ),
    ] = None,
    width: Annotated[
        int | None, typer.Option("--width", metavar="N", help="Width of the networks.")
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option(
            "--rank",
            metavar="N|SHARE|full",
            help="Keep weights as two factors of rank N, or of the least that adds this share (0.1)"
            " to the held-out error.",
        ),
    ] = None,
    polish: Annotated[
        int | None,
        typer.Option(
            "--polish", metavar="STEPS", help="Train the map through the frozen target; 0 not."
        ),
    ] = None,
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
    assign: Annotated[
        str | None,
        typer.Option(
            "--assign",
            metavar="ratio|best|N,N",
            help="How matched heads are paired, or the source head that each target head reads.",
        ),
    ] = None,
    joint: Annotated[
        bool | None, typer.Option("--joint/--no-joint", help="Keys and values from both.")
    ] = None,
    anchor: Annotated[
        bool | None, typer.Option("--anchor/--no-anchor", help="Read the target's layer 0 too.")
    ] = None,
    lookback: Annotated[
        int | None,
        typer.Option("--lookback", metavar="N", help="Tokens before to read too, up to 3."),
    ] = None,
    lookback_layers: options.LookbackLayers = None,
    exact_first: Annotated[
        bool | None,
        typer.Option("--exact-first/--no-exact-first", help="Compute the target's layer 0."),
    ] = None,
    native_layers: Annotated[
        int | None,
        typer.Option("--native-layers", metavar="N", help="Lowest layers the target runs itself."),
    ] = None,
    native_head: Annotated[
        int | None,
        typer.Option("--native-head", metavar="N", help="First tokens the target runs itself."),
    ] = None,
    native_tail: Annotated[
        int | None,
        typer.Option("--native-tail", metavar="N", help="Last tokens it runs itself, from 1."),
    ] = None,
    frontier: Annotated[
        bool,
        typer.Option("--frontier", help="Print what quality costs, of a calibration; fit nothing."),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="SHARE|MS",
            help="Of a prefill's work (0.1), or of time for one context (5ms); picks the best map.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="PNG", help="Draw what `--frontier` prints."),
    ] = None,
    dataset: options.Dataset = None,
    sequences: options.Sequences = None,
    length: options.Length = None,
    stride: options.Stride = None,
    held_out: options.HeldOut = None,
    seed: options.Seed = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Fit a map, doing what must come before."""
    from kvmap.artifacts import refuse_overwrite
    from kvmap.calibration import Calibration
    from kvmap.collect_options import CollectOptions
    from kvmap.collect_pair import Loading, TextOptions
    from kvmap.columns import LOOKBACK
    from kvmap.fit_pair import FitRequest
    from kvmap.models.devices import pick_device

    out = Output(as_json, quiet)
    for path in filter(None, (output, plot)):
        inputs.refuse_inputs(path, layers)
        refuse_overwrite(path, force)
    assigned = inputs.numbers_or_none(assign)
    parts = {
        "assignment": assigned,
        "heads": inputs.one_of("--heads", heads, "all", "matched"),
        "joint": joint,
        "anchor": anchor,
        "lookback": inputs.between("--lookback", lookback, 0, LOOKBACK),
        "lookback_layers": inputs.layers_or_none("--lookback-layers", lookback_layers),
        "exact_first": exact_first,
        "native_layers": inputs.at_least("--native-layers", native_layers, 0),
        "native_head": inputs.at_least("--native-head", native_head, 0),
        "native_tail": inputs.at_least("--native-tail", native_tail, 1),
        # Asked for in so many words, a tail is as long as that.
        "tail_share": None if native_tail is None else 1.0,
    }
    inputs.one_of("--method", method, "top", "greedy", "mlp", "residual")
    networks = method in ("mlp", "residual")
    wanted = {
        "k": inputs.count_or_auto("-k", k),
        "ridge": inputs.ridge_or_auto(ridge),
        "assign": None if assigned else inputs.one_of("--assign", assign, "ratio", "best"),
        "method": method if networks else None,
        "weights": inputs.one_of("--weights", weights, "none", "attention"),
        "width": inputs.at_least("--width", width, 1),
        "rank": inputs.rank_or_share(rank),
        "polish": inputs.at_least("--polish", polish, 0),
    }
    request = FitRequest(
        inputs.edited_recipe(recipe, wanted, parts),
        "top" if networks or method is None else method,
        layers,
        output,
    )
    typed = {"--frontier": frontier, "--budget": budget, "--plot": plot, "--dry-run": dry_run}
    typed |= {"--layers": layers, "-k": k, "--method": method, "--weights": weights}
    typed |= {"--width": width, "--rank": rank, "--polish": polish, "--heads": heads}
    typed |= {"--assign": assign, "--lookback": lookback, "--output": output}
    typed |= {"--lookback-layers": lookback_layers}
    for name, value in (("joint", joint), ("anchor", anchor), ("exact-first", exact_first)):
        typed |= ignored.flag(value, name)
    ignored.in_fit(typed, request.recipe)
    text = {"dataset": dataset, "sequences": sequences, "length": length, "seed": seed}
    kept = {"stride": stride, "held_out": held_out}
    loading = inputs.given(Loading, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    pick_device(loading.device)  # of no use where no model is run, but no nonsense either
    if target is not None and (frontier or budget is not None):
        raise UsageError(
            "--frontier and --budget are for a calibration, found two models; "
            "run `kvmap collect` first and give its folder"
        )
    if target is None:
        _require_calibration(source)
        _refuse(text | kept)
        if not frontier and budget is None:
            how = {"--device": device, "--dtype": dtype, "--trust-remote-code": trust_remote_code}
            ignored.of_models(how, request.recipe)
        calibration = Calibration.open(source)
        if calibration.scope.layers is not None:
            ignored.of_chosen(typed, networks)
        report = _from_calibration(out, calibration, request, loading, typed)
    else:
        asked = inputs.given(CollectOptions, **kept, lookback_layers=parts["lookback_layers"])
        made = (inputs.given(TextOptions, **text), asked, loading)
        report = _from_models(out, (source, target), request, made, typed)
    if report is None:
        return
    for line in fit_text.notes(report):
        out.note(line)
    out.result(report.path, report.to_json())


def _from_calibration(
    out: Output,
    calibration: Calibration,
    request: FitRequest,
    loading: Loading,
    typed: dict[str, Any],
) -> FitReport | None:
    """Fit a map; None where only the plan or the frontier was asked for."""
    from functools import partial

    from kvmap.fit_pair import fit_calibration

    source, target = calibration.source, calibration.target
    openers = tuple(partial(loading.open, side.name) for side in (source, target))
    if typed["--frontier"] or typed["--budget"] is not None:
        request = _frontier(out, calibration, request, loading, openers, typed)
        if request is None:
            return None
    elif calibration.scope.layers is None and request.layers is None:
        inputs.check_count(out, typed["-k"], request.recipe, source.geometry, source.name)
    if typed["--dry-run"]:
        _plan_calibration(out, calibration, request, loading)
        return None
    with out.progress() as progress:
        return fit_calibration(calibration, request, progress, openers=openers)


def _from_models(
    out: Output,
    names: tuple[str, str],
    request: FitRequest,
    made: tuple[TextOptions, CollectOptions, Loading],
    typed: dict[str, Any],
) -> FitReport | None:
    """Fit a map, collecting what is missing; None where only the plan was asked for."""
    from kvmap.collect_pair import geometries
    from kvmap.fit_pair import fit_pair

    *kept, loading = made
    if request.layers is None:
        shape = geometries(names, loading)[0]
        inputs.check_count(out, typed["-k"], request.recipe, shape, names[0])
    if typed["--dry-run"]:
        _plan_models(out, names, request, made)
        return None
    with out.progress() as progress:
        return fit_pair(names, *kept, request, loading, progress, out.note)


def _frontier(
    out: Output,
    calibration: Calibration,
    request: FitRequest,
    loading: Loading,
    openers: tuple[Opener, Opener],
    typed: dict[str, Any],
) -> FitRequest | None:
    """Measure candidates and print them, or return a request for the best within a budget."""
    from dataclasses import replace

    from kvmap.bench.plot import check_plotting
    from kvmap.fit.frontier import plot, within
    from kvmap.pipeline import cost_quality

    budget, picture = typed["--budget"], typed["--plot"]
    limit = None if budget is None else inputs.share_or_milliseconds(budget)
    if picture is not None:
        check_plotting()
    if typed["--dry-run"]:
        _plan_frontier(out, calibration, request, loading)
        return None
    told = lambda *found: out.note(fit_text.candidate(*found))  # noqa: E731
    with out.progress() as progress:
        points = cost_quality(calibration, request.recipe, progress, openers, told)
    if picture is not None:
        plot(points, picture)
    if limit is None:
        out.document({"frontier": [p.to_json() for p in points]}, lambda: fit_text.frontier(points))
        return None
    out.note(fit_text.frontier(points))
    return replace(request, recipe=within(points, *limit).recipe)


def _require_calibration(source: str) -> None:
    """Refuse the name of a model that stands alone."""
    from kvmap.names import is_checkpoint

    if is_checkpoint(source):
        raise UsageError(
            f"{source} is a model, and TARGET is missing; run `kvmap fit {source} TARGET`, "
            "or give a calibration that `kvmap collect` made"
        )


def _refuse(asked: dict[str, Any]) -> None:
    """Refuse options of `collect` beside a calibration, whose text is what it is."""
    found = [f"--{name.replace('_', '-')}" for name, value in asked.items() if value is not None]
    if found:
        raise UsageError(
            f"{found[0]} is for two models, found a calibration alone; "
            "run `kvmap fit SOURCE TARGET` or leave it out"
        )


def _plan_calibration(
    out: Output, calibration: Calibration, request: FitRequest, loading: Any
) -> None:
    from kvmap.plan_fit import calibration_plan

    found = calibration_plan(calibration, request, loading)
    out.document(found, lambda: f"{plan.maps_text(found['maps'])}\n\n{plan.fit_text(found['fit'])}")


def _plan_frontier(
    out: Output, calibration: Calibration, request: FitRequest, loading: Any
) -> None:
    from kvmap.plan_frontier import frontier_plan

    found = frontier_plan(calibration, request, loading)
    out.document({"frontier": found}, lambda: plan.frontier_text(found))


def _plan_models(out: Output, names: tuple[str, str], request: FitRequest, made: tuple) -> None:
    from kvmap.survey import survey

    found = survey(names, *made, request)
    plan.refuse_unpairable(found)
    out.document(found, lambda: plan.text(found))
