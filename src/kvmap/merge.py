"""Join calibrations of one pair over different text into one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvmap import artifacts, atomic
from kvmap.calibration import Calibration
from kvmap.calibration_files import (
    MOMENTS,
    RUN,
    SPLITS,
    TOKENS,
    load_moments,
    save_moments,
    write_index,
)
from kvmap.clearing import clear, read_run
from kvmap.errors import UsageError
from kvmap.geometry import json_digest
from kvmap.moments import Moments

# Options that must agree: they decide which rows are kept and what the moments cover.
MUST_AGREE = (
    "stride",
    "native_head",
    "heads",
    "joint",
    "layers",
    "lookback_layers",
    "dump",
    "moments",
)


def merge(parts: list[Calibration], out: Path, force: bool = False) -> Calibration:
    """Fill a folder with the union of calibrations and return it.

    Raises:
        UsageError: The parts are of other models, options or lengths, share their text, or are
            not sound; nothing is left in the folder then.
    """
    if len(parts) < 2:
        raise UsageError(f"found {len(parts)} calibration to merge, expected at least 2")
    for part in parts[1:]:
        _check(parts[0], part)
    token_ids = torch.cat([part.sequences["token_ids"] for part in parts])
    held_out = torch.cat([part.sequences["held_out"] for part in parts])
    if len(token_ids.unique(dim=0)) < len(token_ids):
        raise UsageError("the calibrations share sequences; merge runs over different text")
    merged = _merged_moments(parts) if parts[0].index["options"]["moments"] else None
    _start(parts, out, force)
    record = {"merged": [part.index["text"] for part in parts]}
    tensors = {"token_ids": token_ids, "held_out": held_out}
    artifacts.write(out / TOKENS, "tokens", tensors, {"text": record}, private=True)
    try:
        index = _index(parts, record, token_ids) | _copy_rows(parts, out)
    except UsageError:
        clear(out)
        raise
    if merged is not None:
        save_moments(out / MOMENTS, *merged)
    write_index(out, index)
    (out / RUN).unlink()
    return Calibration.open(out)


def _start(parts: list[Calibration], out: Path, force: bool) -> None:
    """Write down what this merge is; what a killed one of the same parts left is removed."""
    record = {"kind": "run", "merge": [part.digest for part in parts]}
    if any(part.path.resolve() == out.resolve() for part in parts):
        raise UsageError(f"{out}: is one of the calibrations to merge; choose another folder")
    if force:
        clear(out)
    if read_run(out) == record:
        clear(out)
    atomic.make_folder(out)
    if any(out.iterdir()):
        raise UsageError(f"{out}: is not empty; choose another folder")
    artifacts.write_json(out / RUN, record, private=True)


def _check(first: Calibration, other: Calibration) -> None:
    where = f"{other.path} and {first.path}"
    for side in ("source", "target"):
        remedy = f"merge {other.path} with calibrations of its own pair"
        said = f"{first.path}: its {side}"
        getattr(first, side).require_same(getattr(other, side), said, remedy)
    mine, theirs = first.index, other.index
    differing = [n for n in MUST_AGREE if mine["options"].get(n) != theirs["options"].get(n)]
    differing += ["length"] if mine["length"] != theirs["length"] else []
    if differing:
        raise UsageError(
            f"{where} differ in {', '.join(differing)}; collect both alike to merge them"
        )


def _index(parts: list[Calibration], record: dict[str, Any], token_ids: torch.Tensor) -> dict:
    return parts[0].index | {
        "text": record,
        "tokens_digest": json_digest(token_ids.tolist()),
        "sequences": len(token_ids),
    }


def _copy_rows(parts: list[Calibration], out: Path) -> dict[str, list]:
    """Write every part's shards and head rows under new numbers; return their lists."""
    shards, heads, first = [], [], 0
    for part in parts:
        for shard in part.index["shards"]:
            names = {side: f"{side}-{len(shards):05d}.safetensors" for side in ("source", "target")}
            for side, name in names.items():
                _copy(part.file(shard[side]), out / name, first)
            shards.append(names | {"sequences": shard["sequences"]})
        for name in part.index["heads"]:
            heads.append(f"head-{len(heads):05d}.safetensors")
            _copy(part.file(name), out / heads[-1], first)
        first += part.index["sequences"]
    return {"shards": shards, "heads": heads}


def _copy(path: Path, copy: Path, first_sequence: int) -> None:
    artifact = artifacts.open_artifact(path, "dump")
    tensors = artifact.tensors()
    if "sequence" in tensors:
        tensors["sequence"] = tensors["sequence"] + first_sequence
    artifacts.write(copy, "dump", tensors, artifact.metadata, private=True)


def _merged_moments(parts: list[Calibration]) -> tuple[dict[str, Moments], dict[str, Any]]:
    """Add up the parts' moments, no more than two of them in memory."""
    read = [
        partial(load_moments, part.file(MOMENTS, "moments"), (part.source, part.target), part.scope)
        for part in parts
    ]
    merged, metadata = read[0]()
    for other in read[1:]:
        found, _ = other()
        for split in SPLITS:
            merged[split].merge(found[split])
    return merged, metadata
