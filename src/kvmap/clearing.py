"""Remove a calibration or an interrupted run, and never anything else."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from kvmap import artifacts
from kvmap.calibration_files import INDEX, RUN
from kvmap.errors import UsageError

# All that a calibration or an interrupted run may hold; nothing else is ever removed.
FILES = re.compile(
    r"\.?(index\.json|run\.json|(tokens|moments|(\d+\.)?moments\.partial|(source|target|head)-\d+)"
    r"\.safetensors)(\.\d+\.tmp)?"
)


def clear(out: Path) -> None:
    """Remove a calibration or an interrupted run, and nothing else.

    Raises:
        UsageError: The folder holds neither.
    """
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise UsageError(f"{out}: is no folder; choose another for the calibration")
    files = sorted(out.iterdir())
    foreign = [path.name for path in files if path.is_dir() or not FILES.fullmatch(path.name)]
    if foreign or (files and not _is_ours(out)):
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


def _is_ours(out: Path) -> bool:
    """Return whether a folder says itself that it is a calibration or an interrupted run."""
    return any(
        (out / name).is_file() and artifacts.peek(out / name) in ("calibration", "run")
        for name in (INDEX, RUN)
    )
