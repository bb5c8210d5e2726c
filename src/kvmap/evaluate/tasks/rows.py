"""Local rows in the columns of their hub originals, checked before anything is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvmap.errors import UsageError


def find(data: Path, names: tuple[str, ...], task: str) -> Path:
    """Return the first of some files that a data folder holds, or the file itself.

    Raises:
        UsageError: None is there.
    """
    if data.is_file():
        return data
    for name in (*names, *(f"benchmarks/{name}" for name in names)):
        if (data / name).is_file():
            return data / name
    raise UsageError(f"task {task}: {data} holds none of {', '.join(names)}; pass another --data")


def read_rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, Any]]:
    """Read rows of a JSON-lines file and check that they have the columns.

    Raises:
        UsageError: A line is no JSON object, or lacks a column; says which.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: no JSON object") from error
        missing = [column for column in columns if column not in row]
        if missing:
            raise UsageError(
                f"{path}, line {number}: lacks the column {missing[0]!r}, expected "
                f"{', '.join(columns)} as in the hub's original"
            )
        rows.append(row)
    return rows
