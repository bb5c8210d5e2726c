"""`kvmap transfer`: hand one context from the source to the target."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvmap.cli import ignored, inputs, options
from kvmap.cli.output import Output, amount
from kvmap.errors import UsageError

EXAMPLES = (
    "kvmap transfer m-l.map --prompt-file notes.txt --generate 32 --compare",
    "kvmap transfer m-l.map --messages chat.json -o chat.cache",
)

Prompt = Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="The context.")]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompt-file", metavar="FILE", help="The same from a file; - for standard input."
    ),
]
Messages = Annotated[
    Path | None,
    typer.Option("--messages", metavar="JSON", help="A conversation: a list of role and content."),
]
Cache = Annotated[
    Path | None, typer.Option("--cache", metavar="CACHE", help="The source's own saved cache.")
]
Lowest = Annotated[
    Path | None,
    typer.Option(
        "--lowest",
        metavar="LOWEST",
        help="What `kvmap lowest` made: map without the target, whose part is done elsewhere.",
    ),
]
Generate = Annotated[
    int | None, typer.Option("--generate", metavar="N", help="Let the target go on for N tokens.")
]


def run(
    cmap: options.Map,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    messages: Messages = None,
    cache: Cache = None,
    output: options.output("the target's cache", "CACHE", "nowhere") = None,
    lowest: Lowest = None,
    generate: Generate = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Print what both say from their own prefill too.")
    ] = False,
    require_evidence: Annotated[
        bool,
        typer.Option(
            "--require-evidence", help="Refuse a map that `kvmap eval --sign` has not passed."
        ),
    ] = False,
    source_model: options.SourceModel = None,
    target_model: options.TargetModel = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Hand a context to the target and let it go on."""
    from kvmap.artifacts import refuse_overwrite
    from kvmap.collect_pair import Loading
    from kvmap.mapping import CacheMap
    from kvmap.models import load_lowest
    from kvmap.text import read_file, unknown_remark

    out = Output(as_json, quiet)
    inputs.at_least("--generate", generate, 1)
    _check_asked((prompt, prompt_file, messages, cache), output, generate, compare)
    typed = {"--lowest": lowest, "--cache": cache, "--compare": compare, "--generate": generate}
    typed |= {"--source": source_model, "--target": target_model}
    typed |= {"--device spread": device == "spread", "--trust-remote-code": trust_remote_code}
    ignored.in_transfer(typed)
    inputs.refuse_inputs(output, cmap, cache, lowest, prompt_file, messages)
    if output is not None:
        refuse_overwrite(output, force)
    if prompt_file is not None:
        prompt = _stdin() if str(prompt_file) == "-" else read_file(prompt_file)
    loaded = CacheMap.load(cmap)
    _check_evidence(out, cmap, require_evidence)
    loading = inputs.given(Loading, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    source = target = None
    if lowest is not None:
        target = load_lowest(lowest, loading.device, loading.dtype, loaded.target)
    if cache is None or compare:
        source = loading.open(source_model or loaded.source.name)
    target = target or loading.open(target_model or loaded.target.name)
    reader = target if lowest is None else source
    token_ids, source_cache = _context(reader, loaded, prompt, messages, cache)
    if cache is None and (remark := unknown_remark(token_ids, reader.tokenizer)):
        out.note(remark)
    wanted = token_ids.shape[1] + (generate or 0)
    for model in filter(None, (source, target)):
        model.require_positions(wanted, "context with continuation", "give less of either")
    made = _hand_over(loaded, source, target, token_ids, source_cache, generate, compare)
    head = made.get("native_head")
    made["cache"] = None if output is None else _save(output, made.pop("kv"), target, head)
    made.pop("kv", None)
    out.note(_summary(made))
    out.document({"map": str(cmap), **made}, lambda: _text(made))


def _check_evidence(out: Output, cmap: Path, required: bool) -> None:
    """Say so where nothing shows that a map carries content over, or refuse it."""
    from kvmap.evaluate import evidence

    if required:
        evidence.require(cmap)
        return
    found = evidence.status(cmap)
    if found["state"] != "valid":
        out.note(found["reason"])
    elif found["verdict"] != "recovers":
        out.note(f"this map's evidence says {found['verdict']!r}; `kvmap show {cmap}` has more")


def _check_asked(contexts, output, generate, compare) -> None:
    if sum(context is not None for context in contexts) != 1:
        raise UsageError(
            "expected one context, found "
            f"{sum(context is not None for context in contexts)}; give one of --prompt, "
            "--prompt-file, --messages or --cache"
        )
    if output is None and generate is None:
        raise UsageError("nothing to do; pass -o CACHE to keep the cache or --generate N")
    if compare and generate is None:
        raise UsageError("--compare compares texts; pass --generate N with it")


def _context(reader, cmap, prompt, messages, cache):
    """Return the context's token ids [1, T] and, if it was saved, the source's cache."""
    from kvmap.cache import load_cache
    from kvmap.transfer import message_ids, prompt_ids, require_batch_of_one

    if cache is not None:
        saved, signature = load_cache(cache)
        cmap.source.require_same(signature, f"{cache}: the map's source", "fit a map for this pair")
        return require_batch_of_one(saved), saved
    if messages is not None:
        return message_ids(reader.tokenizer, messages), None
    return prompt_ids(reader.tokenizer, prompt), None


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("standard input cannot be read as text; give a --prompt-file") from error


def _hand_over(cmap, source, target, token_ids, source_cache, generate, compare) -> dict[str, Any]:
    from kvmap.transfer import compare as compare_texts
    from kvmap.transfer import continuation, transfer

    if target.lowest is not None:
        return _map_alone(cmap, source, target, token_ids, source_cache)
    done = transfer(cmap, source, target, token_ids, source_cache)
    made = {
        "outcome": done.handoff.outcome,
        "tokens": token_ids.shape[1],
        "seconds": done.handoff.seconds,
        "kv": done.handoff.cache,
        "bytes": done.handoff.cache.bytes,
    }
    if compare:
        made["text"] = compare_texts(done, source, target, generate)
    elif generate is not None:
        text = continuation(target, done.handoff.cache, token_ids, generate)
        made["text"] = {"mapped": text}
    return made


def _map_alone(cmap, source, lowest, token_ids, source_cache) -> dict[str, Any]:
    from kvmap.handoff import LapClock, check_pair, map_context
    from kvmap.models import prefill

    check_pair(cmap, source, lowest)
    if source_cache is None:
        source_cache, _ = prefill(source, token_ids)
    clock = LapClock(lowest.device)
    mapped = map_context(cmap, lowest, source_cache, token_ids, clock)
    return {
        "outcome": "mapped",
        "tokens": mapped.tokens,
        "native_head": cmap.options.native_head,
        "seconds": clock.seconds,
        "kv": mapped,
        "bytes": mapped.bytes,
    }


def _save(path: Path, cache, target, native_head: int | None) -> str:
    from kvmap.cache import save

    return str(save(cache, path, target.signature, native_head))


def _summary(made: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in made["seconds"].items())
    if not made["tokens"] or made["outcome"] == "fallback_reprefill":
        why = "nothing to map: the context is no longer than head and tail, which the target runs"
        return f"{why}; {parts}" if parts else why
    return f"{made['outcome']}: {made['tokens']} tokens, {amount(made['bytes'])}; {parts}"


def _text(made: dict[str, Any]) -> str:
    """Return the text alone, several texts with their names, or the cache's path."""
    texts = made.get("text")
    if texts is None:
        return made["cache"]
    if len(texts) == 1:
        return texts["mapped"]
    names = ("mapped", "native", "source")
    lines = [f"{name:<8}{texts[name]}" for name in names]
    return "\n".join([*lines, f"agreement of mapped and native: {texts['top1_agreement']:.0%}"])
