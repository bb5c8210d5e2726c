"""Write a file whole or not at all.

The bytes go to a temporary file in the same folder, reach the disk, and only then take the
file's name, in one step. What fails on the way (no space, Ctrl-C, an exception) leaves the old
file as it was and nothing beside it; what a killed process left is swept by the next write.
"""

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvmap.errors import KvmapError, UsageError

Chunk = bytes | memoryview


def write(path: str | Path, chunks: Iterable[Chunk], private: bool = False) -> Path:
    """Write the chunks as the file `path`, replacing what is there, and return the path.

    Args:
        private: Give the file mode 0600 from its first byte; it may hold the user's text.

    Raises:
        UsageError: The path is a folder or a device, or its folder does not exist.
        KvmapError: The disk is full, or the folder cannot be written to.
    """
    # A link keeps pointing where it did; the file behind it is replaced.
    target = Path(os.path.realpath(path))
    check_replaceable(path)
    _sweep(target)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        _write_through(temporary, chunks, 0o600 if private else 0o666)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise KvmapError(
                f"{path}: could not be written ({reason}); nothing was left there, "
                "so make room or choose another path with --output and run the command again"
            ) from error
        raise
    _sync_folder(target.parent)
    return Path(path)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process is at work on a path, and keep others waiting meanwhile.

    The system lets go of it for a process that is killed. Its empty file beside the path stays.
    """
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # A file system without locks, or a system without this call: as if alone.
        with contextlib.suppress(OSError, ImportError):
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> Path:
    """Make a folder and those above it, and return it.

    Raises:
        KvmapError: Something else has its name, or a folder above cannot be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise no_folder(path, error.strerror) from error
    return path


def no_folder(path: Path, reason: str) -> KvmapError:
    """Say that and why a folder could not be made."""
    return KvmapError(
        f"{path}: the folder could not be made ({reason}); choose another with --output, or with "
        "KVMAP_CACHE if it is the cache folder"
    )


def check_replaceable(path: str | Path) -> None:
    """Refuse a path that `write` would not replace.

    Raises:
        UsageError: It is a folder or a device, or its folder does not exist.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise UsageError(f"{path}: no such folder; run `mkdir -p {target.parent}` first")
    # As root, replacing /dev/null would take the device away from the whole machine.
    if os.path.lexists(target) and not stat.S_ISREG(target.lstat().st_mode):
        raise UsageError(f"{path}: is no ordinary file; choose another path with --output")


def _write_through(temporary: Path, chunks: Iterable[Chunk], mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    with open(os.open(temporary, flags, mode), "wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _sweep(target: Path) -> None:
    """Remove temporary files of this target whose process is gone, or is this one."""
    prefix = f".{target.name}."
    for entry in target.parent.iterdir():
        name = entry.name
        if name.startswith(prefix) and name.endswith(".tmp"):
            owner = name[len(prefix) : -len(".tmp")]
            if owner.isdecimal() and not _runs_elsewhere(int(owner)):
                entry.unlink(missing_ok=True)


def _runs_elsewhere(process: int) -> bool:
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _sync_folder(folder: Path) -> None:
    # Some file systems cannot sync a folder; the rename itself has happened.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
