"""Remove a calibration or an interrupted run, and never anything else."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from kvmap import artifacts, header
from kvmap.calibration_files import INDEX, RUN
from kvmap.errors import UsageError

# All that a calibration or an interrupted run may hold; nothing else is ever removed.
FILES = re.compile(
    r"\.?(index\.json|run\.json|(tokens|moments|(\d+\.)?moments\.partial|(source|target|head)-\d+)"
    r"\.safetensors)(\.\d+\.tmp)?"
)


def read_run(out: Path) -> dict[str, Any] | None:
    """Return what an unfinished run in a folder wrote down of itself; None where there is none.

    Raises:
        UsageError: It is damaged.
    """
    try:
        return artifacts.read_json(out / RUN, "run") if (out / RUN).exists() else None
    except UsageError as error:
        problem = str(error).rpartition(";")[0]
        raise UsageError(f"{problem}; pass --force to start anew") from error


def require_unfinished(out: Path, force: bool = False) -> None:
    """Check that a calibration can be made in a folder; what is begun there may be gone on with.

    Args:
        force: A finished calibration there is to be replaced.

    Raises:
        UsageError: It is no folder, or holds a finished calibration.
    """
    if os.path.lexists(out) and not out.is_dir():
        raise UsageError(f"{out}: is no folder; choose another for the calibration")
    if not force and read_run(out) is None and (out / INDEX).exists():
        raise UsageError(f"{out}: holds a finished calibration; pass --force to replace it")


def clear(out: Path) -> None:
    """Remove a calibration or an interrupted run, and nothing else.

    Raises:
        UsageError: The folder holds neither.
    """
    require_unfinished(out, force=True)
    if not os.path.lexists(out):
        return
    files = sorted(out.iterdir())
    foreign = [path.name for path in files if path.is_dir() or not FILES.fullmatch(path.name)]
    if foreign or (files and not _is_ours(files)):
        held = f"holds {foreign[0]!r} too" if foreign else "is no calibration"
        raise UsageError(f"{out}: {held}, and is left alone; choose another folder")
    # Killed half way, it is no calibration any more and can still be cleared.
    if (out / INDEX).exists():
        (out / INDEX).replace(out / RUN)
    for path in out.iterdir():
        if path.name != RUN:
            path.unlink()
    (out / RUN).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a link to a folder, or where a disk is mounted
        out.rmdir()


def _is_ours(files: list[Path]) -> bool:
    """Return whether a folder's files say that they are a calibration or an interrupted run.

    One of them will do, since the index or the run's record itself may be damaged.
    """
    return any(file.name in (INDEX, RUN) for file in files) and any(map(_is_part, files))


def _is_part(file: Path) -> bool:
    with contextlib.suppress(UsageError):
        return header.peek(file) in ("calibration", "run", "tokens", "moments", "dump")
    return False
