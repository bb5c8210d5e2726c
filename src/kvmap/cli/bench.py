"""`kvmap bench`: what a handoff takes beside the target's own prefill, here and now."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvmap.cli import ignored, inputs, options
from kvmap.cli.bench_text import part_text, plan_text, report
from kvmap.cli.output import Output
from kvmap.errors import FloorMissed, UsageError

EXAMPLES = (
    "kvmap bench m-l.map --context 8192 --min-speedup 5 --json",
    "kvmap bench --only map --context 256,1024,4096,16384",
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
        str | None,
        typer.Option(
            "--pair",
            metavar="SOURCE,TARGET",
            help=f"The models, without MAP. [default: {PAIR}]",
        ),
    ] = None,
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
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            metavar="map|stream|fit",
            help="One part by itself: the map over made-up caches, a streaming session, a fit.",
        ),
    ] = None,
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
    trust_remote_code: options.TrustRemoteCode = False,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Time a handoff and the target's own prefill, part by part.

    Medians. A handoff is map, build (of the target's cache) and first token (native head, layer 0
    and tail) together; warm is prefill over handoff, cold counts the source's own prefill too.
    Matmul and copy are the map's share of this machine's peaks, extra the memory beside caches.
    """
    from kvmap import bench
    from kvmap.collect_pair import Loading

    out = Output(as_json, quiet)
    contexts = parse_contexts(context)
    loading = inputs.given(Loading, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    typed = {"MAP": map_file, "--pair": pair, "--both": both, "--recipe": recipe}
    typed |= {"--repeats": repeats, "--budget": budget, "--trust-remote-code": trust_remote_code}
    ignored.in_bench(typed, random_weights or only == "fit")
    jobs = bench.jobs_of(map_file, pair or PAIR, both, recipe)
    bench.check_lengths(jobs, contexts, trust_remote_code)
    _check(against, plot, random_weights, map_file, force)
    asked = _bench_options(budget, repeats, seed, cpu_time)
    part = inputs.one_of("--only", only, *bench.PARTS)
    if part and (plot is not None or against != "hf" or min_speedup is not None):
        raise UsageError("--only goes without --plot, --against and --min-speedup")
    if dry_run:
        rows = bench.plan(jobs, contexts, loading)
        out.document({"plan": rows}, lambda: plan_text(rows))
        return
    if part:
        with out.progress() as progress:
            document = bench.bench_only(
                part, jobs, contexts, loading, asked, random_weights, progress
            )
        out.document(document, lambda: part_text(document, part))
        return
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


def _check(
    against: str, plot: Path | None, random: bool, map_file: Path | None, force: bool
) -> None:
    """Refuse what cannot be done, before any work."""
    from kvmap.artifacts import refuse_overwrite
    from kvmap.bench.against import check_engine
    from kvmap.bench.plot import check_plotting

    check_engine(against)
    if random and (map_file is not None or against != "hf"):
        raise UsageError("--random-weights goes with --pair, and neither with MAP nor vllm")
    if plot is not None:
        check_plotting()
        inputs.refuse_inputs(plot, map_file)
        refuse_overwrite(plot, force)


def _hold_floor(document: dict[str, Any], least: float | None) -> None:
    lowest = min(document["contexts"], key=lambda one: one["warm_speedup"])
    if least is not None and lowest["warm_speedup"] < least:
        raise FloorMissed(
            f"the warm speed-up at {lowest['tokens']} tokens is {lowest['warm_speedup']:.2f}, "
            f"below --min-speedup {least:g}"
        )
