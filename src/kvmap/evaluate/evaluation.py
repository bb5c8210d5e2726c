"""One call from a map and its two models to a report."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import kvmap
from kvmap import header
from kvmap.errors import UsageError
from kvmap.evaluate import arms, diagnostics, evidence, harness, predict
from kvmap.evaluate.harness.local import asked_files
from kvmap.evaluate.items import Ids, Task, check, limited
from kvmap.evaluate.journal import Journal
from kvmap.evaluate.report import Report, build
from kvmap.evaluate.runner import Progress, no_progress, run_task
from kvmap.evaluate.scores import Scores
from kvmap.evaluate.tasks import SOURCES, TASKS, TaskOptions, is_read
from kvmap.evaluate.tasks.rows import files
from kvmap.geometry import json_digest, pairing_problems
from kvmap.handoff import check_pair
from kvmap.mapping import CacheMap
from kvmap.models import LoadedModel
from kvmap.text import beginnings, local_sources, require_known


@dataclass(frozen=True)
class EvaluateOptions:
    """What to evaluate on.

    Attributes:
        tasks: Names of kvmap's tasks, or of lm-evaluation-harness's.
        limit: Largest number of questions per task; None takes all.
        lengths: Context lengths in tokens; empty takes each task's own.
        data: Local rows in hub columns; None reads the hub.
        text: What the task `text` reads.
        turn: Conversations are handed over at this turn, from 1.
        history: What conversations take earlier turns to have answered: "own" or "gold".
        diagnosed: Documents that diagnostics look at; 0 leaves them out.
        few_shot: Worked examples before each question, for the harness's tasks.
        alternate: A map back, so that conversations also pass back and forth.
    """

    tasks: tuple[str, ...] = ("demo",)
    limit: int | None = 100
    lengths: tuple[int, ...] = ()
    seed: int = 0
    data: Path | None = None
    text: str = "demo"
    turn: int = 1
    history: str = "own"
    diagnosed: int = diagnostics.DOCUMENTS
    few_shot: int | None = None
    alternate: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        paths = {name: getattr(self, name) for name in ("data", "alternate")}
        return asdict(self) | {name: path and str(path) for name, path in paths.items()}


def evaluate(
    cmap: CacheMap,
    source: LoadedModel,
    target: LoadedModel,
    options: EvaluateOptions | None = None,
    journal: Path | None = None,
    progress: Progress = no_progress,
) -> Report:
    """Run all tasks over all arms, with diagnostics, and return the report.

    Args:
        journal: File that keeps finished items, so that an interrupted evaluation of the same
            map and options goes on; removed at the end.

    Raises:
        UsageError: An unknown or empty task, contexts too long or unknown to the tokenizer, or
            models of another map.
    """
    options = options or EvaluateOptions()
    check_models(cmap, source, target)
    check_lengths(options, source, target)
    for name in options.tasks:
        check_name(name)
    asked = _asked(source, options)
    tasks = {name: _task(name, asked) for name in options.tasks if name in TASKS}
    for task in tasks.values():
        check(task, source, target)
    strange = _unknown(tasks, source)
    sample = _sample(tasks, asked)
    pair = arms.make_pair(cmap, source, target, sample[0], options.seed)
    pair = replace(pair, back=_back(options.alternate, source, target))
    kept = Journal.open(journal, fingerprint(cmap, options))
    parts = [_run(name, tasks.get(name), pair, options, kept, progress) for name in options.tasks]
    found = None
    if options.diagnosed:
        found = diagnostics.diagnose(pair, sample[: options.diagnosed])
    described = about(cmap, options) | {"unknown": strange}
    report = build(parts, found, described, options.seed, cmap.r2)
    kept.remove()
    return report


def predicted(
    cmap: CacheMap,
    source: LoadedModel,
    target: LoadedModel,
    options: EvaluateOptions,
    seen: Sequence[predict.Seen],
) -> dict[str, Any]:
    """Return what a map is likely to retain, from a few texts; see `predict`."""
    check_models(cmap, source, target)
    check_lengths(options, source, target)
    text = TASKS["text"](_asked(source, options, limit=predict.DOCUMENTS))
    check(text, source, target)
    pair = arms.make_pair(cmap, source, target, text.items[0].context, options.seed)
    read = read_in_calibration(cmap, replace(options, tasks=("text",)))
    return predict.predict(pair, text, seen) | {"read_in_calibration": read}


def _asked(source: LoadedModel, options: EvaluateOptions, **changed: Any) -> TaskOptions:
    shared = {field.name: getattr(options, field.name) for field in fields(TaskOptions)[1:]}
    return TaskOptions(source.tokenizer, **{**shared, **changed})


def _task(name: str, asked: TaskOptions) -> Task:
    return replace(limited(TASKS[name](asked), asked.limit), name=name)


def _run(
    name: str,
    task: Task | None,
    pair: arms.Pair,
    options: EvaluateOptions,
    journal: Journal,
    progress: Progress,
) -> Scores:
    if task is not None:
        return run_task(pair, task, journal, progress)
    return harness.run(name, pair, options, journal, progress)


def _back(path: Path | None, source: LoadedModel, target: LoadedModel) -> CacheMap | None:
    if path is None:
        return None
    back = CacheMap.load(path)
    check_pair(back, target, source)
    return back.to(source.device)


def _unknown(tasks: Mapping[str, Task], source: LoadedModel) -> str | None:
    """Say how much of what is read a tokenizer does not know; None where that is little.

    Raises:
        UsageError: It is more than half.
    """
    contexts = [item.context for task in tasks.values() for item in task.items]
    ids = torch.tensor([token for context in contexts for token in context])
    return require_known(ids, source.tokenizer, "--text, --data or --messages")


def _sample(tasks: dict[str, Task], asked: TaskOptions) -> list[Ids]:
    """Return contexts to diagnose and to match moments on: the tasks' own where there are any."""
    found = [item.context for task in tasks.values() for item in task.items]
    found = [context for context in found if len(context) > 1]
    if found:
        return list(dict.fromkeys(found))
    text = TASKS["text"](replace(asked, limit=8, lengths=()))
    check(text)
    return [item.context for item in text.items]


def check_lengths(options: EvaluateOptions, *models: LoadedModel) -> None:
    """Refuse contexts that no model reads, before they are written.

    Raises:
        UsageError: Saying which.
    """
    longest = max(options.lengths, default=0)
    for loaded in models:
        loaded.require_positions(longest, "--length", "pass a smaller one")


def check_models(cmap: CacheMap, source: LoadedModel, target: LoadedModel) -> None:
    """Refuse models that are not the map's, or that do not share a tokenizer.

    Raises:
        UsageError: Saying which.
    """
    problems = pairing_problems(source.signature, target.signature)
    if problems:
        raise UsageError(f"these models cannot be compared: {problems[0]}")
    check_pair(cmap, source, target)


def check_name(name: str) -> None:
    """Refuse a task that neither kvmap nor the harness knows.

    Raises:
        UsageError: With near matches.
    """
    if name in TASKS:
        return
    others = harness.task_names()
    if others is not None and name in others:
        return
    near = difflib.get_close_matches(name, (*TASKS, *(others or ())), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"kvmap has {', '.join(TASKS)}"
    more = "" if others is not None else " (lm-eval's tasks need `pip install 'kvmap[eval]'`)"
    raise UsageError(f"no task named {name!r}; {hint}{more}")


def fingerprint(cmap: CacheMap, options: EvaluateOptions) -> str:
    """Return a digest of what decides an evaluation's scores, but for the rows asked."""
    back = options.alternate
    other = evidence.digest(back) if back is not None and back.is_file() else None
    return json_digest([kvmap.__version__, map_digest(cmap), options.to_json(), other])


def map_digest(cmap: CacheMap) -> str:
    """Return a digest of a map in memory: its models, options and weights."""
    digest = sha256(json_digest([cmap.source.digest, cmap.target.digest]).encode())
    digest.update(json_digest(asdict(cmap.options)).encode())
    for layer in cmap.layers:
        digest.update(repr(layer and layer.source_layers).encode())
        for part in () if layer is None else (layer.key, layer.value):
            for name, weights in sorted(part.tensors().items()):
                digest.update(name.encode())
                digest.update(weights.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def about(cmap: CacheMap, options: EvaluateOptions) -> dict[str, Any]:
    """Return what was evaluated, as plain data."""
    return {
        "map_sha256": map_digest(cmap),
        "source": cmap.source.name,
        "target": cmap.target.name,
        "k": max((len(layer.source_layers) for layer in cmap.layers if layer), default=0),
        "map_options": asdict(cmap.options) | {"assignment": list(cmap.options.assignment)},
        "provenance": cmap.provenance,
        "read_in_calibration": read_in_calibration(cmap, options),
        "options": options.to_json(),
        "version": kvmap.__version__,
    }


def read_in_calibration(cmap: CacheMap, options: EvaluateOptions) -> dict[str, str]:
    """Return the files an evaluation reads that the map's calibration has read too.

    Files are known again whole, by the digest of their beginning (`text.BEGINNING` bytes). What
    cannot be noticed: a part of a file, its rows in another order or another format, the same
    text behind another beginning, and rows of the hub. An empty answer is no proof.

    Returns:
        By the file's name, what of it is known to be the same: "content", or, where a map keeps
        no more, "name".
    """
    back = options.alternate and header.read_safetensors(options.alternate, "map")
    found = {}
    for file, digest in beginnings(_files(options)).items():
        name = Path(file).name
        for text in _texts([cmap.provenance, back]):
            if isinstance(known := text.get("files"), list):
                found |= {name: "content"} if digest in known else {}
            elif name in (Path(n.partition("#")[0]).name for n in str(text["dataset"]).split(",")):
                found.setdefault(name, "name")
    return found


def _files(options: EvaluateOptions) -> Iterator[Path]:
    """Yield the local files that tasks may read.

    Raises:
        UsageError: Some are not there.
    """
    if is_read("text", options.tasks):
        yield from local_sources(options.text, "test")
    if options.data is None:
        return
    for name in options.tasks:
        if name in SOURCES:
            yield from files(name, SOURCES[name], options.data)
        elif name == "chat":
            yield options.data
        elif name not in TASKS:
            yield from asked_files(name, options.data)


def _texts(record: Any) -> Iterator[Mapping[str, Any]]:
    """Yield what provenance says of each text, of merged calibrations and composed maps too."""
    if isinstance(record, Mapping) and "dataset" in record:
        yield record
    parts = record.values() if isinstance(record, Mapping) else record
    for part in parts if isinstance(record, Mapping | list | tuple) else ():
        yield from _texts(part)
