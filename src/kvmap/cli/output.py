"""The one place that prints.

Standard output carries data alone: a report, one JSON document, or the path of what was
written. Progress, hints and errors go to standard error; bars only when that is a terminal.
Nothing is folded or padded to a terminal's width, so that output reads the same in a pipe.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmap.header import without_nan

Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class Output:
    """What a command prints to, given `--json` and `--quiet`."""

    as_json: bool = False
    quiet: bool = False

    def document(self, data: Any, text: Callable[[], str]) -> None:
        """Print `data` as one JSON document, or else the text made for people."""
        if self.as_json:
            print(json.dumps(without_nan(data), indent=2, ensure_ascii=False, allow_nan=False))
        else:
            print(text())

    def path(self, path: Path | str) -> None:
        """Print the path of what was written, for the next command; JSON carries its own."""
        if not self.as_json:
            print(path)

    def note(self, text: str) -> None:
        """Tell people something that is not data."""
        if not self.quiet:
            print(text, file=sys.stderr)

    @contextmanager
    def progress(self, label: str) -> Iterator[Advance]:
        """Show a bar on a terminal while the work calls back with (done, total)."""
        if self.quiet or not sys.stderr.isatty():
            yield lambda done, total: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            task = bars.add_task(label, total=None)
            yield lambda done, total: bars.update(task, completed=done, total=total)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Align rows under a head: text to the left, numbers to the right, two spaces between."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = [all(_numeric(row[i]) for row in rows) for i in range(len(head))]
    lines = [head, *cells]
    return "\n".join(
        "  ".join(
            value.rjust(width) if side else value.ljust(width)
            for value, width, side in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def amount(count: float) -> str:
    """Write bytes with a unit: 1234567 becomes `1.2 MB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def figure(value: float | None, digits: int = 3) -> str:
    """Write a figure, or a dash where there is none."""
    return "-" if value is None or value != value else f"{value:.{digits}f}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return figure(value) if isinstance(value, float) else str(value)


def _numeric(value: Any) -> bool:
    return value is None or isinstance(value, int | float)
