"""Rows of a data set, one by one: local files, folders of them, and streamed hub data sets.

Every row comes with its place, for messages; no message repeats what a row says. The only
module that touches datasets and pyarrow.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvmap.errors import UsageError

HUB_NAMES = {"fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT")}

Placed = tuple[str, Mapping[str, Any]]


def rows(
    where: str, split: str, reached: Callable[[Path], None] = lambda file: None
) -> Iterator[Placed]:
    """Yield the rows of a file, a folder or a hub data set, each with its place.

    Args:
        split: Of a hub data set, or of a folder's files where some are of it.
        reached: Told of each local file before its first row.

    Raises:
        UsageError: Nothing is there, or a row cannot be read.
    """
    files = local_files(where, split)
    if files is None:
        yield from _hub_rows(where, split)
    for file in files or ():
        reached(file)
        yield from _file_rows(file)


def local_files(where: str, split: str) -> list[Path] | None:
    """Return the files that rows are read from, in order; None for a hub data set.

    Raises:
        UsageError: A folder holds none.
    """
    path = Path(os.path.expanduser(where))
    if os.path.isdir(path):  # which takes a name of any length
        files = files_in(path)
        if not files:
            raise UsageError(f"{where}: no {', '.join(READERS)} file in this folder")
        return [f for f in files if of_split(f, split)] or files
    local = os.path.exists(path) or path.suffix in READERS or where.startswith((".", "/", "~"))
    return [path] if local else None


def files_in(folder: Path) -> list[Path]:
    """Return a folder's files that can be read, in order; what `datasets` caches there is none."""
    files = sorted(p for p in folder.rglob("*") if p.suffix in READERS and p.is_file())
    return [p for p in files if not (p.suffix == ".arrow" and p.name.startswith("cache-"))]


def of_split(file: Path, split: str) -> bool:
    """Say whether a file's name begins with a split's, or, saved by `datasets`, its folder's."""
    return file.name.startswith(split) or (file.suffix == ".arrow" and file.parent.name == split)


def _file_rows(path: Path) -> Iterator[Placed]:
    if not os.path.isfile(path):
        raise UsageError(f"{path}: no such file; name a file that is there, or a data set")
    if path.suffix not in READERS:
        raise UsageError(f"{path}: expected a {', '.join(READERS)} file or a folder of them")
    try:
        yield from READERS[path.suffix](path)
    except OSError as error:
        raise UsageError(f"{path}: could not be read ({error.strerror or 'damaged'})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: is not UTF-8 text; convert it") from error


def _json_lines(path: Path) -> Iterator[Placed]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise UsageError(f"{path}: line {number} is no JSON object; mend or remove it")
            yield f"{path}, line {number}", row


def _parquet(path: Path) -> Iterator[Placed]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    yield str(path), row
    except ArrowException as error:
        raise UsageError(f"{path}: is no sound parquet file; make it again") from error


def _arrow(path: Path) -> Iterator[Placed]:
    """Read what `Dataset.save_to_disk` writes, a stream, or an Arrow file proper."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source:
            try:
                table = pyarrow.ipc.open_stream(source).read_all()
            except pyarrow.ArrowInvalid:
                table = pyarrow.ipc.open_file(source).read_all()
            for batch in table.to_batches(max_chunksize=256):
                for row in batch.to_pylist():
                    yield str(path), row
    except pyarrow.ArrowException as error:
        raise UsageError(f"{path}: is no sound Arrow file; make it again") from error


def _paragraphs(path: Path) -> Iterator[Placed]:
    """Yield what blank lines separate, so that a book gives more than one sequence."""
    lines: list[str] = []
    with path.open(encoding="utf-8") as text:
        for line in text:
            if line.strip():
                lines.append(line)
            elif lines:
                yield str(path), {"text": "".join(lines)}
                lines = []
    yield str(path), {"text": "".join(lines)}


READERS = {
    ".jsonl": _json_lines,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".txt": _paragraphs,
}


def _hub_rows(where: str, split: str) -> Iterator[Placed]:
    name, _, config = where.partition(":")
    name, config = HUB_NAMES.get(name, (name, config or None))
    try:
        from datasets import load_dataset

        for row in load_dataset(name, config, split=split, streaming=True):
            yield where, row
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise UsageError(
            f"{where}: neither a local file nor a readable hub data set ({reason}); "
            "give a local .jsonl, .parquet or .txt file"
        ) from error
