"""`kvmap bench`: what a handoff takes beside the target's own prefill, here and now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvmap.cli import inputs, options
from kvmap.cli.output import Output, amount, figure, table
from kvmap.errors import FloorMissed, UsageError

if TYPE_CHECKING:
    from kvmap.pair import Loading

EXAMPLES = (
    "kvmap bench --context 1024,4096",
    "kvmap bench m-l.map --context 8192 --min-speedup 5 --json",
)
PAIR, CONTEXT = "tiny-m,tiny-l", "1024,4096"


def run(
    map_file: Annotated[
        Path | None,
        typer.Argument(metavar="MAP", help="A map that `kvmap fit` made. [default: one is made]"),
    ] = None,
    context: Annotated[
        str, typer.Option("--context", metavar="N,...", help="Lengths of context, in tokens.")
    ] = CONTEXT,
    pair: Annotated[
        str, typer.Option("--pair", metavar="SOURCE,TARGET", help="The models, without MAP.")
    ] = PAIR,
    both: Annotated[
        bool, typer.Option("--both", help="The other direction too, without MAP.")
    ] = False,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            metavar="NAME,...",
            help="Presets side by side. [default: kvmap]",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            metavar="SECONDS",
            parser=options.number,
            help="Time for each context. [default: 20]",
        ),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", metavar="N", help="Exactly so many rounds instead.")
    ] = None,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="Build --pair from configs alone; no download."),
    ] = False,
    against: Annotated[
        str, typer.Option("--against", metavar="ENGINE", help="Whose prefill to beat: hf or vllm.")
    ] = "hf",
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="IMAGE", help="Draw latency by context.")
    ] = None,
    cpu_time: Annotated[
        bool,
        typer.Option("--cpu-time", help="Count CPU seconds, on a machine that does other work."),
    ] = False,
    min_speedup: Annotated[
        float | None,
        typer.Option(
            "--min-speedup",
            metavar="X",
            parser=options.number,
            help="Exit 3 if a warm speed-up is lower.",
        ),
    ] = None,
    dry_run: options.DryRun = False,
    seed: options.Seed = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Time a handoff and the target's own prefill, part by part."""
    from kvmap import bench
    from kvmap.pair import Loading

    out = Output(as_json, quiet)
    contexts = parse_contexts(context)
    loading = inputs.given(Loading, device=device, dtype=dtype)
    jobs = bench.jobs_of(map_file, pair, both, recipe)
    if dry_run:
        _plan(out, jobs, contexts, loading)
        return
    _check(against, plot, random_weights, map_file)
    asked = _bench_options(budget, repeats, seed, cpu_time)
    measure = bench.bench_shapes if random_weights else bench.bench_maps
    with out.progress() as progress:
        document = measure(jobs, contexts, loading, asked, progress)
    if against == "vllm":
        bench.against_vllm(document, jobs, loading, asked)
    if plot is not None:
        document["plot"] = str(bench.plot(document["contexts"], plot))
    out.document(document, lambda: report(document))
    _hold_floor(document, min_speedup)


def parse_contexts(given: str) -> list[int]:
    """Read lengths of context.

    Raises:
        UsageError: One is no number of at least 2.
    """
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and 2 <= int(part[:10]) < 10**9 for part in parts):
        raise UsageError(f"found --context {given!r}, expected numbers from 2, joined by commas")
    return [int(part) for part in parts]


def _bench_options(
    budget: float | None, repeats: int | None, seed: int | None, cpu_time: bool
) -> Any:
    from kvmap.bench import BenchOptions

    if repeats is not None and repeats < 1:
        raise UsageError(f"found --repeats {repeats}, expected at least 1")
    if budget is not None and budget <= 0:
        raise UsageError(f"found --budget {budget:g}, expected seconds above 0")
    asked = {"budget": budget, "repeats": repeats, "seed": seed, "cpu_time": cpu_time}
    return BenchOptions(**{key: value for key, value in asked.items() if value is not None})


def _check(against: str, plot: Path | None, random: bool, map_file: Path | None) -> None:
    """Refuse what cannot be done, before any work."""
    from kvmap.artifacts import refuse_overwrite
    from kvmap.bench.against import check_engine
    from kvmap.bench.plot import check_plotting

    check_engine(against)
    if random and (map_file is not None or against != "hf"):
        raise UsageError("--random-weights goes with --pair, and neither with MAP nor vllm")
    if plot is not None:
        check_plotting()
        refuse_overwrite(plot, force=True)


def _plan(out: Output, jobs: list, contexts: list[int], loading: Loading) -> None:
    from kvmap.bench.plan import plan

    rows = plan(jobs, contexts, loading)
    out.document(
        {"plan": rows},
        lambda: table(
            ("source", "target", "recipe", "tokens", "caches", "map GFLOP", "seconds"),
            [
                (
                    row["source"],
                    row["target"],
                    row["recipe"],
                    row["tokens"],
                    amount(row["cache_bytes"]),
                    round(row["map_flops"] / 1e9, 1),
                    round(row["seconds"], 1),
                )
                for row in rows
            ],
        ),
    )


COLUMNS = {
    "tokens": "tokens",
    "source ms": "source_prefill_seconds",
    "map ms": "map_seconds",
    "build ms": "build_seconds",
    "first token ms": "first_token_seconds",
    "handoff ms": "handoff_seconds",
    "prefill ms": "target_prefill_seconds",
}


def report(document: dict[str, Any]) -> str:
    """Lay out medians, speed-ups and shares of the machine's peaks."""
    head = ("source", "target", "recipe", *COLUMNS, "warm", "cold", "matmul", "copy", "extra")
    rows = [_row(one) for one in document["contexts"]]
    machine = document["machine"]
    peaks = (machine["matmul_flops"] / 1e9, machine["copy_bytes"] / 1e9)
    last = (
        f"{machine['name']}, {machine['threads']} threads, {machine['dtype']}, {machine['clock']}: "
        f"{peaks[0]:.1f} GFLOP/s, {peaks[1]:.1f} GB/s copied"
    )
    lines = [table(head, rows), last]
    if document["maps"]:
        loads = ", ".join(f"{one['load_seconds'] * 1e3:.0f}" for one in document["maps"])
        lines.append(f"map loaded from disk in {loads} ms")
    for one in document["contexts"]:
        if "prefill" in one:
            lines.append(f"{one['tokens']} tokens: prefill {one['prefill']}; map {one['mapped']}")
    return "\n".join(lines)


def _row(one: dict[str, Any]) -> list[Any]:
    cells: list[Any] = [one["source"], one["target"], one["recipe"], one["tokens"]]
    cells += [round(one[key] * 1e3, 1) for key in list(COLUMNS.values())[1:]]
    cells += [f"{one[key]:.1f}×" for key in ("warm_speedup", "cold_speedup")]
    cells += [
        "-" if one[key] is None else f"{figure(100 * one[key], 0)} %"
        for key in ("matmul_share", "copy_share")
    ]
    return [*cells, amount(one["extra_bytes"])]


def _hold_floor(document: dict[str, Any], least: float | None) -> None:
    lowest = min(document["contexts"], key=lambda one: one["warm_speedup"])
    if least is not None and lowest["warm_speedup"] < least:
        raise FloorMissed(
            f"the warm speed-up at {lowest['tokens']} tokens is {lowest['warm_speedup']:.2f}, "
            f"below --min-speedup {least:g}"
        )
