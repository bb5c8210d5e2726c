"""Rows of public benchmarks, from the hub or from local files in the same columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmap import rows
from kvmap.errors import UsageError


@dataclass(frozen=True)
class Source:
    """Where a task's rows are.

    Attributes:
        hub: `owner/name` or `owner/name:config`.
        split: Split of the hub's data set.
        folders: Names of the folder that holds them under `--data`, any of which will do.
        columns: Columns that every row must have.
    """

    hub: str
    split: str
    folders: tuple[str, ...]
    columns: tuple[str, ...]


def read(task: str, source: Source, data: Path | None) -> Iterator[dict[str, Any]]:
    """Yield rows that have the columns.

    Raises:
        UsageError: The data is not there, a row cannot be read or lacks a column.
    """
    where = source.hub if data is None else str(local(task, source, data))
    for place, row in rows.rows(where, source.split):
        missing = [column for column in source.columns if column not in row]
        if missing:
            raise UsageError(
                f"task {task}: {place} lacks the column {missing[0]!r}, expected "
                f"{', '.join(source.columns)} as in {source.hub}"
            )
        yield dict(row)


def files(task: str, source: Source, data: Path) -> list[Path]:
    """Return the local files that a task's rows are read from.

    Raises:
        UsageError: There are none.
    """
    return rows.local_files(str(local(task, source, data)), source.split) or []


def local(task: str, source: Source, data: Path) -> Path:
    """Return the file or folder of a task under a data folder, or the file itself.

    Raises:
        UsageError: It is not there.
    """
    if data.is_file():
        return data
    for name in source.folders:
        for folder in (data / name, data / "benchmarks" / name):
            if folder.is_dir():
                return folder
    if any(data.glob(f"{source.split}*")) or any(data.glob("*.arrow")):
        return data
    raise UsageError(
        f"task {task}: {data} holds no folder {' or '.join(source.folders)}; pass the folder that "
        "holds it, or a file, with `--data`"
    )
