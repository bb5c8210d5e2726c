"""What an interrupted evaluation has finished: a file of lines, one an item.

The file's first line says what it belongs to; another evaluation's is not used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO


@dataclass(eq=False)
class Journal:
    """What is finished, by task and a digest of the item; kept in a file where there is one."""

    path: Path | None = None
    fingerprint: str = ""
    found: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path | None, fingerprint: str) -> Journal:
        """Read what an interrupted evaluation of the same fingerprint has left."""
        journal = cls(path, fingerprint)
        if path is None:
            return journal
        lines = list(_lines(path))
        if lines and lines[0].get("fingerprint") == fingerprint:
            for line in lines[1:]:
                if [type(line.get(n)) for n in ("task", "item", "kept")] == [str, str, dict]:
                    journal.found[line["task"], line["item"]] = line["kept"]
        journal._rewrite()
        return journal

    def _rewrite(self) -> None:
        """Start the file anew from what is sound: a killed run may have left half a line."""
        with self._opened(os.O_TRUNC) as file:
            file.write(json.dumps({"fingerprint": self.fingerprint}) + "\n")
            for (task, item), kept in self.found.items():
                file.write(_line(task, item, kept))

    def _opened(self, how: int) -> TextIO:
        """Open the file, readable by its owner only: answers may repeat the user's text."""
        return open(os.open(self.path, os.O_WRONLY | os.O_CREAT | how, 0o600), "w")

    def get(self, task: str, item: str) -> dict[str, Any] | None:
        """Return what was kept of an item."""
        return self.found.get((task, item))

    def put(self, task: str, item: str, kept: dict[str, Any]) -> None:
        """Keep plain data of a finished item."""
        self.found[task, item] = kept
        if self.path is not None and not self.path.exists():
            self._rewrite()  # another process with the same evaluation has finished
        elif self.path is not None:
            with self._opened(os.O_APPEND) as file:
                file.write(_line(task, item, kept))

    def remove(self) -> None:
        """Forget the file: the report is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _line(task: str, item: str, kept: dict[str, Any]) -> str:
    return json.dumps({"task": task, "item": item, "kept": kept}) + "\n"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            return
        if isinstance(line, dict):
            yield line
