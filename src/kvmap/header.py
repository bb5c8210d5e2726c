"""What a file says about itself: kind, version and digests, read without trusting any of it.

A header is a JSON object. `kind` says what the file is, `version` how it is laid out, `sha256`
covers the tensors, `header_sha256` the header's other fields; the rest is provenance. Every
flaw is one sentence that names the file and the command that makes a good one. Knows nothing
of tensors.
"""

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvmap.errors import UsageError

VERSION = 1
INDEX = "index.json"
RESERVED = ("kind", "version", "sha256", "header_sha256")
MAXIMUM_BYTES = 100_000_000  # as safetensors has it

# Each kind of artifact, and the command that makes one.
MADE_BY = {
    "calibration": "kvmap collect SOURCE TARGET -o CALIB",
    "dump": "kvmap collect SOURCE TARGET -o CALIB",
    "run": "kvmap collect SOURCE TARGET -o CALIB",
    "tokens": "kvmap collect SOURCE TARGET -o CALIB",
    "moments": "kvmap collect SOURCE TARGET -o CALIB",
    "layers": "kvmap select-layers CALIB -o LAYERS",
    "map": "kvmap fit SOURCE TARGET -o MAP",
    "polish": "kvmap fit SOURCE TARGET --polish STEPS -o MAP",
    "lowest": "kvmap lowest MAP -o LOWEST",
    "cache": "kvmap transfer MAP --prompt TEXT -o CACHE",
    "report": "kvmap eval MAP -o REPORT",
}


def dump(data: Any) -> str:
    """Write JSON in the one form that digests are taken of."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def without_nan(data: Any) -> Any:
    """Copy JSON-like data with null in place of NaN and infinity."""
    if isinstance(data, Mapping):
        return {str(key): without_nan(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [without_nan(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data


def sealed(kind: str, provenance: Mapping[str, Any], digest: str | None) -> dict[str, Any]:
    """Complete a header: the reserved fields come last, so that nothing replaces them."""
    assert kind in MADE_BY, kind
    fields = {key: value for key, value in provenance.items() if key not in RESERVED}
    fields |= {"kind": kind, "version": VERSION}
    if digest is not None:
        fields["sha256"] = digest
    return {**fields, "header_sha256": _digest(fields)}


def check(path: Path, fields: Any, kind: str | None) -> dict[str, Any]:
    """Return the header if it is whole, known, and of the kind expected.

    Raises:
        UsageError: In one sentence, what is wrong with it.
    """
    if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
        raise unusable(path, "does not say what kind of kvmap file it is", kind)
    found, version = fields["kind"], fields.get("version")
    if found not in MADE_BY:
        raise unusable(path, "is of a kind that this kvmap does not know", kind)
    if type(version) is not int or version < 1:
        raise unusable(path, "has no format version", kind)
    if version > VERSION:
        raise UsageError(
            f"{path}: has format version {version}, newer than this kvmap's {VERSION}; "
            "run `pip install --upgrade kvmap`"
        )
    if kind is not None and found != kind:
        raise unusable(path, f"is a {found} file, where a {kind} was expected", kind)
    rest = {key: value for key, value in fields.items() if key != "header_sha256"}
    if fields.get("header_sha256") != _digest(rest):
        raise unusable(path, "is damaged: its header does not match its digest", found)
    return fields


def read_safetensors(path: Path, kind: str | None = None) -> dict[str, Any]:
    """Read and check the header of a safetensors file, leaving the tensors alone."""
    require_file(path, kind)
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            if not 2 <= length <= MAXIMUM_BYTES:
                raise unusable(path, "is no safetensors file", kind)
            if 8 + length > size:
                raise unusable(path, "is cut short", kind)
            table = parse(path, file.read(length), kind)
    except OSError as error:
        raise unusable(path, f"could not be read ({error.strerror})", kind) from error
    metadata = table.get("__metadata__") if isinstance(table, dict) else None
    text = metadata.get("kvmap") if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise unusable(path, "was not written by kvmap", kind)
    return check(path, parse(path, text.encode(errors="replace"), kind), kind)


def read_json(path: Path, kind: str | None = None) -> dict[str, Any]:
    """Read and check a JSON artifact, header fields and all."""
    require_file(path, kind)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise unusable(path, f"could not be read ({error.strerror})", kind) from error
    return check(path, parse(path, text, kind), kind)


def peek(path: str | Path) -> str:
    """Return the kind of a file or calibration folder, reading its header alone.

    Raises:
        UsageError: It is no kvmap artifact.
    """
    path = Path(path)
    if os.path.isdir(path):  # which takes a name of any length
        return read_json(path / INDEX, "calibration")["kind"]
    if path.suffix == ".json":
        return read_json(path)["kind"]
    return read_safetensors(path)["kind"]


def parse(path: Path, text: bytes, kind: str | None) -> Any:
    """Read JSON from a file that may hold anything."""
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise unusable(path, "is damaged or not a kvmap file", kind) from error


def require_file(path: Path, kind: str | None) -> None:
    """Refuse what is missing, a folder, a device or a pipe, before anything opens it."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise unusable(path, "no such file", kind) from error
    if stat.S_ISDIR(mode):
        raise unusable(path, f"is a folder, where a {kind or 'kvmap'} file was expected", kind)
    if not stat.S_ISREG(mode):
        raise unusable(path, "is a device or a pipe, not a file", kind)


# What reading a header that is not as it should be runs into.
UNSOUND = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


@contextmanager
def sound(path: str | Path, kind: str) -> Iterator[None]:
    """Say in one sentence that a header is not as its kind's is, whatever reading it runs into.

    Raises:
        UsageError: Instead of what a missing key, a wrong type or an impossible number raises.
    """
    try:
        yield
    except UNSOUND as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:120]
        raise unusable(path, f"the {kind}'s header is not sound ({reason})", kind) from error


def unusable(path: str | Path, problem: str, kind: str | None) -> UsageError:
    """Say what is wrong with a file, and which command makes a good one."""
    if kind in MADE_BY:
        return UsageError(f"{path}: {problem}; run `{MADE_BY[kind]}` to make one")
    return UsageError(f"{path}: {problem}; run `kvmap --help` for the commands that make files")


def _digest(fields: Mapping[str, Any]) -> str:
    try:
        text = dump(fields)
    except (ValueError, RecursionError):
        return "no digest"  # NaN in JSON read from a file: matches nothing
    return sha256(text.encode()).hexdigest()
