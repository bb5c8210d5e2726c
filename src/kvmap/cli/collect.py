"""`kvmap collect`: text through both models; content-space caches and their moments out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvmap.cli import ignored, inputs, options
from kvmap.cli.output import Output, amount
from kvmap.cli.plan import collect_text, here_text, refuse_unpairable
from kvmap.errors import UsageError

EXAMPLES = (
    "kvmap collect tiny-m tiny-l -o m-l.calib --sequences 200 --length 512",
    "kvmap collect qwen3-8b qwen3-14b --layers q.layers --dataset fineweb-edu,chats.jsonl -n",
)


def run(
    source: options.Source,
    target: options.Target,
    output: options.output("the calibration", "CALIB") = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="SOURCE and TARGET are calibrations: join them.")
    ] = False,
    dataset: options.Dataset = None,
    sequences: options.Sequences = None,
    length: options.Length = None,
    stride: options.Stride = None,
    held_out: options.HeldOut = None,
    heads: Annotated[
        str | None,
        typer.Option(
            "--heads", metavar="all|matched", help="Moments to keep. [default: all, if they fit]"
        ),
    ] = None,
    joint: Annotated[
        bool | None,
        typer.Option(
            "--joint/--no-joint", help="Keys beside values, and the anchors. [default: if they fit]"
        ),
    ] = None,
    layers: Annotated[
        Path | None,
        typer.Option(
            "--layers", metavar="LAYERS", help="Moments of what this choice of layers reads alone."
        ),
    ] = None,
    lookback_layers: options.LookbackLayers = None,
    products: Annotated[
        str | None,
        typer.Option(
            "--products",
            metavar="float64|float32",
            help="Multiply rows in; float32 is faster, for a ridge from 1e-5. [default: float64]",
        ),
    ] = None,
    dump: Annotated[bool, typer.Option("--dump/--no-dump", help="Keep the rows.")] = True,
    moments: Annotated[bool, typer.Option("--moments/--no-moments", help="Keep moments.")] = True,
    seed: options.Seed = None,
    device: options.SharedDevice = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
    dry_run: options.DryRun = False,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Run both models over text; keep their caches and moments."""
    from kvmap.clearing import require_unfinished
    from kvmap.collect_options import CollectOptions
    from kvmap.collect_pair import Loading, TextOptions
    from kvmap.survey import survey

    out, names = Output(as_json, quiet), (source, target)
    typed = {"--dataset": dataset, "--sequences": sequences, "--length": length, "--seed": seed}
    typed |= {"--stride": stride, "--held-out": held_out, "--heads": heads, "--layers": layers}
    typed |= {"--lookback-layers": lookback_layers}
    typed |= {"--products": products, "--no-dump": not dump, "--no-moments": not moments}
    typed |= {"--device": device, "--dtype": dtype, "--dry-run": dry_run}
    typed |= {"--trust-remote-code": trust_remote_code}
    ignored.in_collect(typed | ignored.flag(joint, "joint"), merge, moments)
    loading = inputs.given(Loading, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    asked = inputs.given(
        CollectOptions,
        stride=stride,
        held_out=held_out,
        heads=inputs.one_of("--heads", heads, "all", "matched"),
        joint=joint,
        layers=_chosen(layers),
        lookback_layers=inputs.layers_or_none("--lookback-layers", lookback_layers),
        products=inputs.one_of("--products", products, "float64", "float32"),
        dump=dump,
        moments=moments,
    )
    text = inputs.given(TextOptions, dataset=dataset, sequences=sequences, length=length, seed=seed)
    if output is not None and not merge:
        require_unfinished(output, force)
    if dry_run:
        _plan(out, survey(names, text, asked, loading), output)
        return
    started = time.perf_counter()
    if merge:
        made, reused = _merge(names, output, force), False
    else:
        made, reused = _collect(out, names, text, asked, output, loading, force)
    _report(out, made, reused, time.perf_counter() - started)


def _plan(out: Output, found: dict[str, Any], output: Path | None) -> None:
    """Print what collecting takes, and whether this machine has it."""
    from kvmap.plan_fit import here

    refuse_unpairable(found)
    cost = found["collect"]
    place = here([cost], where=output)
    out.document(cost | {"here": place}, lambda: f"{collect_text(cost)}\n\n{here_text(place)}")


def _chosen(path: Path | None):
    """Read which source layers each target layer reads."""
    if path is None:
        return None
    from kvmap.layers import load_layers

    return load_layers(path)[1]


def _collect(out: Output, names, text, asked, output, loading, force):
    from kvmap.collect_pair import collect_pair, geometries, read_text, require_room, with_scope

    asked = with_scope(asked, geometries(names, loading))
    require_room(names, text, asked, output, loading)
    found = read_text(names, text, loading, out.note)
    with out.progress() as progress:
        return collect_pair(names, found, asked, output, loading, progress, force)


def _merge(names: tuple[str, str], output: Path | None, force: bool):
    from kvmap.calibration import Calibration
    from kvmap.merge import merge

    if output is None:
        raise UsageError("--merge writes a new calibration; say where with -o CALIB")
    return merge([Calibration.open(name) for name in names], output, force)


def _report(out: Output, made, reused: bool, seconds: float) -> None:
    from kvmap.ranks import is_first

    if not is_first():
        return
    state = "collected before and reused" if reused else f"{seconds:.1f} s"
    out.note(f"{made.tokens} tokens, {amount(made.bytes)}, {state}")
    document = {
        "calibration": str(made.path),
        "tokens": made.tokens,
        "bytes": made.bytes,
        "seconds": seconds,
        "reused": ["collect"] if reused else [],
    }
    out.result(made.path, document)
