"""Run a task's items through all arms, once each, keeping what is done.

Caches are made once per item and shared by arms and questions; memory holds one item's. Each
item's scores go to a journal as they come, so an interrupted evaluation goes on where it
stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from kvmap.evaluate import alternate
from kvmap.evaluate.arms import ARMS, Pair, caches
from kvmap.evaluate.items import Item, Task, check, documents, wrong_context
from kvmap.evaluate.journal import Journal
from kvmap.evaluate.scores import Record, Scores, join, record
from kvmap.evaluate.scoring import ask, converse
from kvmap.geometry import json_digest

Progress = Callable[[str, int, int], None]


def no_progress(task: str, done: int, total: int) -> None:
    """Say nothing."""


def run_task(
    pair: Pair,
    task: Task,
    journal: Journal | None = None,
    progress: Progress = no_progress,
    arms: Sequence[str] = tuple(ARMS),
) -> Scores:
    """Return a task's scores over all arms.

    Raises:
        UsageError: The task is empty, or a model cannot read its contexts.
    """
    check(task, pair.source, pair.target)
    journal = journal or Journal()
    if pair.back is not None and task.history is not None:
        arms = (*arms, *alternate.ARMS)
    records = []
    for unit, item in enumerate(task.items):
        progress(task.name, unit, len(task.items))
        key = json_digest([unit, asdict(item)])
        kept = journal.get(task.name, key)
        made = Record(**kept) if kept else _score(pair, task, unit, item, arms)
        if not kept:
            journal.put(task.name, key, made.to_json())
        records.append(made)
    units = documents(task.items)
    records = [replace(made, unit=unit) for made, unit in zip(records, units, strict=True)]
    progress(task.name, len(task.items), len(task.items))
    return join(records, task.name, task.chance, arms)


def _score(pair: Pair, task: Task, unit: int, item: Item, arms: Sequence[str]) -> Record:
    answers = {}
    for name, reader, cache in caches(pair, item.context, wrong_context(task.items, unit), arms):
        if task.history is None:
            answers[name] = ask(reader, cache, item.probes, task.max_new_tokens)
        else:
            answers[name] = converse(reader, cache, item, task)
    if set(alternate.ARMS) <= set(arms):
        answers |= alternate.alternate(pair, item, task)
    return record(unit, item.probes, answers, arms)
