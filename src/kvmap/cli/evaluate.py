"""`kvmap eval`: how good a map is, beside everything it could be mistaken for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvmap.cli import ignored, inputs, layout, options
from kvmap.cli.output import Output
from kvmap.errors import UsageError

EXAMPLES = (
    "kvmap eval m-l.map --tasks demo,text -o m-l.report --html m-l.html",
    "kvmap eval m-l.map --limit 200 --min-gap-recovered 0.8 --min-margin 0.2 --sign",
)

Tasks = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        metavar="NAMES",
        help="Joined by commas: demo, needle, text, wikitext2, demo_conversations, coqa, chat, or "
        "any of lm-evaluation-harness. [default: demo]",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", metavar="N", help="Questions per task; 0 for all. [default: 100]"),
]
Lengths = Annotated[
    str | None,
    typer.Option("--length", metavar="TOKENS,...", help="Lengths of context, where chosen."),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Local rows in hub columns, instead of the hub: .jsonl, .parquet, or saved by "
        "datasets.",
    ),
]
Text = Annotated[
    str | None,
    typer.Option("--text", metavar="NAME", help="What the task text reads. [default: demo]"),
]
Messages = Annotated[
    Path | None,
    typer.Option("--messages", metavar="FILE", help="Conversations to go on with (task chat)."),
]
Turn = Annotated[
    int | None,
    typer.Option("--turn", metavar="N", help="Turn at which conversations pass. [default: 1]"),
]
History = Annotated[
    str | None,
    typer.Option(
        "--history", metavar="own|gold", help="Earlier answers in conversations. [default: own]"
    ),
]
Alternate = Annotated[
    Path | None,
    typer.Option("--alternate", metavar="MAP", help="A map back: conversations pass to and fro."),
]
FewShot = Annotated[
    int | None,
    typer.Option("--few-shot", metavar="N", help="Worked examples in lm-eval's tasks."),
]
Diagnosed = Annotated[
    int | None,
    typer.Option("--diagnosed", metavar="N", help="Documents for diagnostics. [default: 8]"),
]


def _floor(name: str, what: str, side: str = "below") -> type:
    return Annotated[
        float | None,
        typer.Option(
            name, metavar="X", parser=options.number, help=f"Exit 3 if {what} may be {side} X."
        ),
    ]


def run(
    cmap: options.Map,
    tasks: Tasks = None,
    limit: Limit = None,
    length: Lengths = None,
    data: Data = None,
    text: Text = None,
    messages: Messages = None,
    turn: Turn = None,
    history: History = None,
    alternate: Alternate = None,
    few_shot: FewShot = None,
    diagnosed: Diagnosed = None,
    predict: Annotated[
        bool, typer.Option("--predict", help="Run no task: guess the retention from a few texts.")
    ] = False,
    output: options.output("the report; its JSON goes beside it", "REPORT", "nowhere") = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write one page with pictures.")
    ] = None,
    sign: Annotated[
        bool, typer.Option("--sign", help="Put the verdict beside the map, bound to it.")
    ] = False,
    min_retention: _floor("--min-retention", "retention") = None,
    min_gap_recovered: _floor("--min-gap-recovered", "the gap recovered") = None,
    min_margin: _floor("--min-margin", "the margin over the best control") = None,
    min_cosine: _floor("--min-cosine", "the attention-output cosine") = None,
    max_kl: _floor("--max-kl", "the divergence from native, in nats per token,", "above") = None,
    source_model: options.SourceModel = None,
    target_model: options.TargetModel = None,
    seed: options.Seed = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure a map beside native, source and controls.

    Exit code 3 where a floor is missed, or where another document's cache does as well.
    """
    from kvmap.artifacts import refuse_overwrite
    from kvmap.collect_pair import Loading
    from kvmap.evaluate import evidence
    from kvmap.evaluate.evaluation import EvaluateOptions
    from kvmap.evaluate.gates import Gates, enforce
    from kvmap.evaluate.report import report_files

    out = Output(as_json, quiet)
    reports = report_files(output) if output else ()
    if html is not None and html.resolve() in {path.resolve() for path in reports}:
        raise UsageError(f"{html}: is where the report goes; choose another path with --html")
    if sign:
        evidence.check_place(cmap)
    for path in (*reports, *filter(None, (html,))):
        inputs.refuse_inputs(path, cmap, alternate, messages, evidence.evidence_path(cmap))
        refuse_overwrite(path, force)
    asked = inputs.given(
        EvaluateOptions,
        tasks=_tasks(tasks, messages),
        lengths=_lengths(length),
        data=messages or data,
        text=text,
        turn=inputs.at_least("--turn", turn, 1),
        history=inputs.one_of("--history", history, "own", "gold"),
        alternate=alternate,
        few_shot=inputs.at_least("--few-shot", few_shot, 0),
        diagnosed=inputs.at_least("--diagnosed", diagnosed, 0),
        seed=seed,
    )
    asked = _limited(asked, inputs.at_least("--limit", limit, 0))
    typed = {"--tasks": tasks, "--limit": limit, "--length": length, "--data": data}
    typed |= {"--text": text, "--messages": messages, "--turn": turn, "--history": history}
    typed |= {"--alternate": alternate, "--few-shot": few_shot, "--diagnosed": diagnosed}
    typed |= {"--output": output, "--html": html, "--sign": sign, "--max-kl": max_kl}
    typed |= {"--min-retention": min_retention, "--min-gap-recovered": min_gap_recovered}
    typed |= {"--min-margin": min_margin, "--min-cosine": min_cosine}
    ignored.in_eval(typed, asked.tasks, predict)
    gates = Gates(min_retention, min_gap_recovered, min_margin, min_cosine, max_kl)
    loading = inputs.given(Loading, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    places = (source_model, target_model, loading)
    if predict:
        guess = _predict(cmap, asked, places)
        _note_read(out, guess["read_in_calibration"])
        out.document({"map": str(cmap), **guess}, lambda: layout.prediction(guess))
        return
    found = _evaluate(out, cmap, asked, places, sign)
    if output is not None:
        found.save(output)
    if html is not None:
        _page(html, found)
    if sign:
        out.note(f"signed {found.figures['verdict']!r}: {evidence.sign(cmap, found, output)}")
    written = {"map": str(cmap), "report": None if output is None else str(output)}
    out.document(found.figures | written, lambda: layout.render(found.figures))
    enforce(found.figures, gates)


def _tasks(tasks: str | None, messages: Path | None) -> tuple[str, ...] | None:
    if tasks is None:
        return None if messages is None else ("chat",)
    names = tuple(dict.fromkeys(name.strip() for name in tasks.split(",") if name.strip()))
    if not names:
        raise UsageError(f"found --tasks {tasks!r}, expected names joined by commas")
    return names if messages is None or "chat" in names else (*names, "chat")


def _lengths(given: str | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and 4 <= int(part[:10]) < 10**9 for part in parts):
        raise UsageError(f"found --length {given!r}, expected numbers from 4, joined by commas")
    return tuple(int(part) for part in parts)


def _limited(asked: Any, limit: int | None) -> Any:
    """Return the options with the limit; 0 asks for all there is."""
    from dataclasses import replace

    return asked if limit is None else replace(asked, limit=limit or None)


def _models(cmap: Any, places: tuple) -> tuple[Any, Any]:
    """Return a map's two models."""
    source, target, loading = places
    return loading.open(source or cmap.source.name), loading.open(target or cmap.target.name)


def _folder() -> Path:
    """Return where unfinished evaluations and the maps seen so far are kept."""
    from kvmap import atomic
    from kvmap.pipeline import cache_folder

    return atomic.make_folder(cache_folder() / "evaluations")


def _evaluate(out: Output, path: Path, asked: Any, places: tuple, sign: bool) -> Any:
    """Return the report; one that cannot be signed is not made where it should be."""
    from kvmap.evaluate.evaluation import evaluate, fingerprint, read_in_calibration
    from kvmap.evaluate.evidence import check_held_out
    from kvmap.evaluate.predict import remember
    from kvmap.mapping import CacheMap

    cmap = CacheMap.load(path)
    if sign:
        check_held_out(path, read_in_calibration(cmap, asked))
    source, target = _models(cmap, places)
    journal = _folder() / f"{fingerprint(cmap, asked)[:24]}.jsonl"
    with out.progress() as progress:
        found = evaluate(cmap, source, target, asked, journal, progress)
    remember(_folder() / "seen.jsonl", found.figures)
    _note_read(out, found.figures["about"]["read_in_calibration"])
    if remark := found.figures["about"]["unknown"]:
        out.note(remark)
    return found


def _note_read(out: Output, read: dict[str, str]) -> None:
    """Say that text is not held out."""
    for name, what in read.items():
        out.note(
            f"{name}: the map's calibration has read a file of the same {what}, so what is "
            "measured on it is not held out"
        )


def _predict(path: Path, asked: Any, places: tuple) -> dict[str, Any]:
    from kvmap.evaluate.evaluation import predicted
    from kvmap.evaluate.predict import recall
    from kvmap.mapping import CacheMap

    cmap = CacheMap.load(path)
    return predicted(cmap, *_models(cmap, places), asked, recall(_folder() / "seen.jsonl"))


def _page(path: Path, found: Any) -> None:
    from kvmap import atomic
    from kvmap.evaluate.page import page

    atomic.write(path, [page(found).encode()])
