"""Run a task's items through all arms, once each, keeping what is done.

Caches are made once per item and shared by arms and questions; memory holds one item's. Each
item's scores go to a file of lines as they come, so an interrupted evaluation goes on where
it stopped. The file's first line says what it belongs to; another evaluation's is not used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from kvmap.evaluate import alternate
from kvmap.evaluate.arms import ARMS, Pair, caches
from kvmap.evaluate.items import Item, Task, check, wrong_context
from kvmap.evaluate.scores import Record, Scores, join, record
from kvmap.evaluate.scoring import ask, converse

Progress = Callable[[str, int, int], None]


def no_progress(task: str, done: int, total: int) -> None:
    """Say nothing."""


@dataclass(eq=False)
class Journal:
    """Records of finished items, by task and unit; kept in a file where there is one."""

    path: Path | None = None
    fingerprint: str = ""
    found: dict[tuple[str, int], Record] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | None, fingerprint: str) -> Journal:
        """Read what an interrupted evaluation of the same fingerprint has left."""
        journal = cls(path, fingerprint)
        if path is None:
            return journal
        lines = list(_lines(path))
        if lines and lines[0].get("fingerprint") == fingerprint:
            for line in lines[1:]:
                journal.found[line["task"], line["record"]["unit"]] = Record(**line["record"])
        journal._rewrite()
        return journal

    def _rewrite(self) -> None:
        """Start the file anew from what is sound: a killed run may have left half a line."""
        with self._opened(os.O_TRUNC) as file:
            file.write(json.dumps({"fingerprint": self.fingerprint}) + "\n")
            for (task, _), kept in self.found.items():
                file.write(_line(task, kept))

    def _opened(self, how: int) -> TextIO:
        """Open the file, readable by its owner only: answers may repeat the user's text."""
        return open(os.open(self.path, os.O_WRONLY | os.O_CREAT | how, 0o600), "w")

    def add(self, task: str, made: Record) -> Record:
        """Keep a finished item."""
        self.found[task, made.unit] = made
        if self.path is not None and not self.path.exists():
            self._rewrite()  # another process with the same evaluation has finished
        elif self.path is not None:
            with self._opened(os.O_APPEND) as file:
                file.write(_line(task, made))
        return made

    def remove(self) -> None:
        """Forget the file: the report is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _line(task: str, made: Record) -> str:
    return json.dumps({"task": task, "record": made.to_json()}) + "\n"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for text in path.read_text(errors="replace").splitlines():
        try:
            yield json.loads(text)
        except ValueError:
            return


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
    for loaded in (pair.source, pair.target):
        check(task, loaded.signature.geometry.max_positions, loaded.signature.name)
    journal = journal or Journal()
    if pair.back is not None and task.history is not None:
        arms = (*arms, *alternate.ARMS)
    records = []
    for unit, item in enumerate(task.items):
        progress(task.name, unit, len(task.items))
        done = journal.found.get((task.name, unit))
        records.append(done or journal.add(task.name, _score(pair, task, unit, item, arms)))
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
