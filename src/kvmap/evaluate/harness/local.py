"""Task configurations that read local rows, in the columns of the hub's originals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmap import rows
from kvmap.errors import UsageError
from kvmap.evaluate.tasks.rows import Source, local

SPLITS = ("train", "validation", "test", "dev")


@dataclass(frozen=True)
class Local:
    """Where a task's rows lie under a data folder, and their columns; `by` splits a group."""

    folder: str
    columns: tuple[str, ...]
    by: str | None = None


ARC = ("question", "choices", "answerKey")
LOCAL = {
    "arc_easy": Local("arc_easy", ARC),
    "arc_challenge": Local("arc_challenge", ARC),
    "gsm8k": Local("gsm8k", ("question", "answer")),
    "hellaswag": Local("hellaswag", ("activity_label", "ctx_a", "ctx_b", "endings", "label")),
    "mmlu": Local("mmlu", ("question", "subject", "choices", "answer"), by="subject"),
    "piqa": Local("piqa", ("goal", "sol1", "sol2", "label")),
    "winogrande": Local("winogrande_xl", ("sentence", "option1", "option2", "answer")),
}


def specifications(name: str, data: Path | None) -> list[str | dict[str, Any]]:
    """Return what to ask the harness for: the task's name, or configurations of local rows.

    Raises:
        UsageError: The rows are not there or lack a column.
    """
    if data is None:
        return [name]
    if name not in LOCAL:
        raise UsageError(
            f"task {name}: no local rows are known for it, expected one of {', '.join(LOCAL)}; "
            "leave out `--data` to read the hub"
        )
    found = LOCAL[name]
    folder = local(name, Source(name, "test", found.folder, found.columns), data)
    files = {split: path for split in SPLITS if (path := _file(folder, split))}
    if not files:
        raise UsageError(f"task {name}: {folder} holds no {', '.join(SPLITS)} .jsonl or .parquet")
    values = {split: _check(name, path, found) for split, path in files.items()}
    # Only in a group does the harness lay changes over a task of its own.
    if found.by is None:
        return [{"group": f"local_{name}", "task": [_configuration(name, files)]}]
    asked = values.get("test") or next(iter(values.values()))
    tasks = [
        _configuration(f"{name}_{value}", files) | {"process_docs": _only(found.by, value)}
        for value in sorted(asked)
    ]
    return [{"group": f"local_{name}", "task": tasks}]


def _file(folder: Path, split: str) -> Path | None:
    if folder.is_file():
        return folder if split == "test" else None
    return next((p for end in ("jsonl", "parquet") for p in folder.glob(f"{split}*.{end}")), None)


def _check(name: str, path: Path, found: Local) -> set[str]:
    """Check every row's columns; return the values that split a group."""
    values = set()
    for place, row in rows.rows(str(path), "test"):
        missing = [column for column in found.columns if column not in row]
        if missing:
            raise UsageError(
                f"task {name}: {place} lacks the column {missing[0]!r}, expected "
                f"{', '.join(found.columns)}"
            )
        if found.by:
            values.add(str(row[found.by]))
    return values


def _configuration(name: str, files: dict[str, Path]) -> dict[str, Any]:
    """Return the harness's own task with its data put in place of the hub's.

    It asks the test rows, else the validation rows; examples come from others where there are
    any. The harness itself leaves the row asked out of its examples.
    """
    kind = "parquet" if next(iter(files.values())).suffix == ".parquet" else "json"
    asked = next(split for split in ("test", "validation", "dev", "train") if split in files)
    examples = next(split for split in ("dev", "train", "validation", "test") if split in files)
    return {
        "task": name,
        "dataset_path": kind,
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(path) for split, path in files.items()}},
        "training_split": None,
        "validation_split": None,
        "test_split": asked,
        "fewshot_split": examples,
    }


def _only(column: str, value: str) -> Callable[[Any], Any]:
    return lambda rows_: rows_.filter(lambda row: row[column] == value)
