"""The one place that prints.

Standard output carries data alone: a report, one JSON document, or the path of what was
written. Progress, hints and errors go to standard error; bars only when that is a terminal.
Nothing is folded or padded to a terminal's width, so that output reads the same in a pipe.
Names and texts come from files and may hold anything: no control character but a tab or the end
of a line reaches the terminal, colours of our own apart.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmap.header import without_nan

Progress = Callable[[str, int, int], None]

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but for tabs and ends of lines
COLOUR = re.compile(r"\x1b\[([34]8;5;\d{1,3}|0)m")  # as `heat` writes it


@dataclass(frozen=True)
class Output:
    """What a command prints to, given `--json` and `--quiet`."""

    as_json: bool = False
    quiet: bool = False

    @property
    def colour(self) -> bool:
        """Whether notes may be coloured."""
        return sys.stderr.isatty() and "NO_COLOR" not in os.environ

    @property
    def stdout_colour(self) -> bool:
        """Whether data may be coloured."""
        return sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def document(self, data: Any, text: Callable[[], str]) -> None:
        """Print `data` as one JSON document, or else the text made for people."""
        if self.as_json:
            plain = (sys.stdout.encoding or "utf-8").lower() not in ("utf-8", "utf8")
            made = json.dumps(without_nan(data), indent=2, ensure_ascii=plain, allow_nan=False)
            print(CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", made))
        else:
            print(_harmless(text(), self.stdout_colour))

    def result(self, path: Path | str, document: Any) -> None:
        """Print the path of what was written, for the next command, or all about it as JSON."""
        self.document(document, lambda: str(path))

    def note(self, text: str) -> None:
        """Tell people something that is not data."""
        if not self.quiet:
            _say(_harmless(text, self.colour))

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Show bars on a terminal while the work calls back with (step, done, total)."""
        if self.quiet or not sys.stderr.isatty():
            yield lambda step, done, total: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
            tasks: dict[str, Any] = {}

            def advance(step: str, done: int, total: int) -> None:
                if step not in tasks:
                    tasks[step] = bars.add_task(step, total=total)
                bars.update(tasks[step], completed=done, total=total)

            yield advance


def complain(sentence: str) -> None:
    """Say why a command stopped, in one line whatever the names in it hold."""
    _say(f"Error: {printable(sentence)}")


def printable(text: str) -> str:
    """Spell out what moves the cursor or colours: names come from files, and may hold anything."""
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def printable_data(data: Any) -> Any:
    """Copy JSON-like data with its texts and keys spelt out, each in one line; see `printable`."""
    if isinstance(data, dict):
        return {printable(str(key)): printable_data(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [printable_data(value) for value in data]
    return printable(data) if isinstance(data, str) else data


def _harmless(text: str, colour: bool) -> str:
    """Spell out what moves the cursor, in texts of several lines; `heat`'s colours may stay."""
    return CONTROLS.sub(
        lambda found: (
            found[0] if colour and COLOUR.match(text, found.start()) else printable(found[0])
        ),
        text,
    )


def _say(text: str) -> None:
    """Write to stderr; that nobody can read it changes neither the work nor how it ends."""
    with suppress(OSError):
        print(text, file=sys.stderr)


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


def large(count: float) -> str:
    """Write a large count with its letter: 1234567 becomes `1.2 M`."""
    for letter in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{count:.0f} {letter}".rstrip() if not letter else f"{count:.1f} {letter}"
        count /= 1000
    return f"{count:.1f} P"


def figure(value: float | None, digits: int = 3) -> str:
    """Write a figure, or a dash where there is none."""
    return "-" if value is None or value != value else f"{value:.{digits}f}"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return figure(value) if isinstance(value, float) else str(value)


def _numeric(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def heat(table: Sequence[Sequence[float]], chosen: Sequence[Sequence[int]], colour: bool) -> str:
    """Draw R² of target layers (down) by source layers (across); what is chosen has a star."""
    lines = ["held-out R², target layers down, source layers across, * chosen"]
    lines.append("     " + "".join(f"{column:>5} " for column in range(len(table[0]))))
    for row, values in enumerate(table):
        cells = (_heat_cell(v, column in chosen[row], colour) for column, v in enumerate(values))
        lines.append(f"{row:>4} " + "".join(cells))
    return "\n".join(lines)


def _heat_cell(value: float, chosen: bool, colour: bool) -> str:
    text = f"{value:>5.2f}{'*' if chosen else ' '}"
    if not colour:
        return text
    # 24 greys of the 256-colour palette, darker for less, text in the other colour.
    grey = 232 + round(23 * min(max(value, 0.0), 1.0))
    return f"\x1b[48;5;{grey}m\x1b[38;5;{231 if grey < 244 else 16}m{text}\x1b[0m"
