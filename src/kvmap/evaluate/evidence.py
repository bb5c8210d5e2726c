"""Evidence bound to a map: what an evaluation found, beside the map, valid for it alone.

`MAP.evidence.json` carries the digest of the map's file and of the report, the verdict and
the main figures; its own digest covers all of them. A map that is fitted again, or edited,
no longer has it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import file_digest
from pathlib import Path
from typing import Any

from kvmap import artifacts, header
from kvmap.errors import UsageError
from kvmap.evaluate.report import Report
from kvmap.geometry import json_digest

FIGURES = (
    "verdict",
    "unsure",
    "score",
    "retention",
    "gap_recovered",
    "margin",
    "margin_control",
    "n",
    "documents",
    "intervals",
    "undefined",
)


# What else an evidence file has, and of which type what is read of it must be.
_TYPES = {
    "n": int,
    "documents": int,
    "verdict": str,
    "intervals": dict,
    "undefined": dict,
    "tasks": list,
    "cosine": dict,
}
_FIELDS = {*FIGURES, *_TYPES, "report_file_sha256", "figures_sha256"}


def evidence_path(map_path: Path) -> Path:
    """Return where a map's evidence lies."""
    return map_path.with_name(f"{map_path.name}.evidence.json")


def check_place(map_path: Path) -> None:
    """Check that a map's evidence can be written.

    Raises:
        UsageError: Something else has its name, or its folder cannot be written to.
    """
    path = evidence_path(map_path)
    if os.path.lexists(path) and not path.is_file():
        raise UsageError(f"{path}: is no file, so the map cannot be signed; move it away")
    if path.parent.is_dir() and not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path}: cannot be written; copy the map to a folder of yours")


def sign(map_path: Path, report: Report, report_path: Path | None = None) -> Path:
    """Write what a report found beside the map it judges.

    Raises:
        UsageError: Its text is not held out.
    """
    read = report.figures["about"]["read_in_calibration"]
    check_held_out(map_path, read)
    data = {
        "kind": "report",
        "evidence_for": map_path.name,
        "map_file_sha256": digest(map_path),
        "report_file_sha256": None if report_path is None else digest(report_path),
        "figures_sha256": json_digest(artifacts.without_nan(report.figures)),
        **{name: report.figures[name] for name in FIGURES},
        "tasks": sorted(report.figures["tasks"]),
        "cosine": report.figures["cosine"],
        "read_in_calibration": read,
    }
    return artifacts.write_json(evidence_path(map_path), data)


def check_held_out(map_path: Path, read: Mapping[str, str]) -> None:
    """Refuse to sign what is measured on text that the map's calibration has read.

    Args:
        read: As `evaluation.read_in_calibration` returns it.

    Raises:
        UsageError: There is some.
    """
    for name, what in read.items():
        raise UsageError(
            f"{map_path}: cannot be signed by what is measured on {name}, since its calibration "
            f"has read a file of the same {what}; evaluate it on other text"
        )


def status(map_path: Path) -> dict[str, Any]:
    """Return a map's evidence with its "state".

    "valid" comes with what `sign` wrote; "none", "stale" (it was given for another map, or for
    this one as it was before) and "damaged" come with the "reason", one sentence.
    """
    path, measure = evidence_path(map_path), f"`kvmap eval --sign {map_path}`"
    if not path.exists():
        return {"state": "none", "reason": f"no evidence for this map yet; {measure} measures it"}
    try:
        found = artifacts.read_json(path, "report")
        if found.get("map_file_sha256") == digest(map_path):
            with header.sound(path, "report"):
                _check(found)
            return {**found, "state": "valid"}
    except UsageError as error:
        return {"state": "damaged", "reason": str(error)}
    reason = f"{path}: is evidence for another map than {map_path} is now; run {measure}"
    return {"state": "stale", "reason": reason}


def _check(found: dict[str, Any]) -> None:
    """Check that all that `sign` writes is there.

    Raises:
        ValueError: Something is missing, or of another type.
    """
    missing = sorted(_FIELDS - set(found))
    wrong = missing or [name for name, kind in _TYPES.items() if type(found[name]) is not kind]
    if wrong:
        raise ValueError(f"{wrong[0]} is missing or of another type")


def read(map_path: Path) -> dict[str, Any] | None:
    """Return a map's evidence, None where it has none.

    Raises:
        UsageError: The evidence is damaged, or was given for another map.
    """
    found = status(map_path)
    if found["state"] in ("stale", "damaged"):
        raise UsageError(found["reason"])
    return found if found["state"] == "valid" else None


def require(map_path: Path) -> dict[str, Any]:
    """Return a map's evidence that it recovers something.

    Raises:
        UsageError: There is none, or it says otherwise.
    """
    found = read(map_path)
    if found is None:
        raise UsageError(f"{map_path}: no evidence; run `kvmap eval --sign {map_path}`")
    if found["verdict"] != "recovers":
        raise UsageError(f"{map_path}: its evidence says {found['verdict']!r}, expected 'recovers'")
    return found


def digest(path: Path) -> str:
    """Return the sha256 of a file."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
