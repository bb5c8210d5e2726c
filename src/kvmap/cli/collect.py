"""`kvmap collect`: text through both models; content-space caches and their moments out."""

import time
from typing import Annotated

import typer

from kvmap.cli import inputs, options
from kvmap.cli.output import Output, amount

EXAMPLES = (
    "kvmap collect tiny-m tiny-l -o m-l.calib --sequences 200 --length 512",
    "kvmap collect qwen3-8b qwen3-14b --dataset fineweb-edu,chats.jsonl --no-dump",
)


def run(
    source: options.Source,
    target: options.Target,
    output: options.output("the calibration", "CALIB") = None,
    dataset: options.Dataset = None,
    sequences: options.Sequences = None,
    length: options.Length = None,
    stride: options.Stride = None,
    held_out: options.HeldOut = None,
    heads: Annotated[
        str | None, typer.Option("--heads", metavar="all|matched", help="Which moments to keep.")
    ] = None,
    dump: Annotated[bool, typer.Option("--dump/--no-dump", help="Keep the rows.")] = True,
    moments: Annotated[bool, typer.Option("--moments/--no-moments", help="Keep moments.")] = True,
    seed: options.Seed = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Run both models over text; keep their caches and moments."""
    from kvmap.collect import CollectOptions, clear
    from kvmap.pair import (
        Loading,
        TextOptions,
        collect_pair,
        geometries,
        read_text,
        with_scope,
    )

    out, names = Output(as_json, quiet), (source, target)
    loading = inputs.given(Loading, device=device, dtype=dtype)
    asked = inputs.given(
        CollectOptions,
        stride=stride,
        held_out=held_out,
        heads=inputs.one_of("--heads", heads, "all", "matched"),
        dump=dump,
        moments=moments,
    )
    text_options = inputs.given(
        TextOptions, dataset=dataset, sequences=sequences, length=length, seed=seed
    )
    if output is not None and force:
        clear(output)
    started = time.perf_counter()
    text = read_text(names, text_options, loading)
    asked = with_scope(asked, geometries(names, loading))
    with out.progress() as progress:
        made, reused = collect_pair(names, text, asked, output, loading, progress)
    seconds = time.perf_counter() - started
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
