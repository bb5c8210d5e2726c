"""A calibration folder: token ids, dumped rows, moments, and the index that makes it whole."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmap import artifacts, header
from kvmap.calibration_files import (
    FLOATS,
    INDEX,
    MOMENTS,
    RUN,
    SPLITS,
    TOKENS,
    Scope,
    empty_moments,
    files_of,
    head_rows,
    load_moments,
    load_rows,
    read_column,
    read_tensor,
    scope_of,
)
from kvmap.errors import UsageError
from kvmap.geometry import Geometry, Signature, json_digest
from kvmap.layers import are_layers_of
from kvmap.map_options import ascending
from kvmap.moments import Moments

FILE = re.compile(r"(source|target|head)-\d+\.safetensors")


@dataclass(frozen=True)
class Calibration:
    """An opened calibration; tensors are read when asked for."""

    path: Path
    source: Signature
    target: Signature
    index: dict[str, Any]

    @classmethod
    def open(cls, path: Path | str) -> Calibration:
        """Open a folder that `kvmap collect` finished.

        Raises:
            UsageError: There is no finished calibration, or its index is not sound.
        """
        path = Path(path)
        if not os.path.exists(path / INDEX):  # which takes a name of any length
            state = "an unfinished run" if os.path.exists(path / RUN) else "no calibration"
            raise UsageError(
                f"{path}: found {state}, expected a folder with {INDEX}; "
                "run `kvmap collect` to make it"
            )
        index = artifacts.read_json(path / INDEX, "calibration")
        if "digests" not in index:
            raise UsageError(
                f"{path}: was collected by an earlier kvmap, which kept no digests of its files; "
                "run `kvmap collect` again, with --force to replace it"
            )
        with header.sound(path / INDEX, "calibration"):
            source, target = (Signature.from_json(index[side]) for side in ("source", "target"))
            _check_index(index)
            _check_scope(scope_of(index["options"]), source.geometry, target.geometry)
        return cls(path, source, target, index)

    @property
    def digest(self) -> str:
        """What a layer choice or a map was made from."""
        kept = {key: self.index[key] for key in ("options", "text", "tokens_digest", "digests")}
        # A model's digest leaves out its dtype, which its rows are rounded to, and its cache's
        # shape, which is what the index says it is.
        sides = (self.source, self.target)
        models = [[side.digest, side.dtype, side.geometry.to_json()] for side in sides]
        return json_digest([kept, *models])

    @property
    def scope(self) -> Scope:
        """Which moments it keeps, or its rows give."""
        return scope_of(self.index["options"])

    @property
    def tokens(self) -> int:
        """Number of tokens both models read."""
        return self.index["sequences"] * self.index["length"]

    @property
    def bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.stat().st_size for file in self.path.iterdir() if file.is_file())

    def file(self, name: str, kind: str = "dump") -> Path:
        """Return where one of its files lies, to be opened and so held to its digest.

        Raises:
            UsageError: It is not the file that was collected.
        """
        path = self.path / name
        digests = dict(zip(files_of(self.index), self.index["digests"], strict=True))
        if header.read_safetensors(path, kind).get("sha256") != digests.get(name):
            raise UsageError(
                f"{path}: is not the file that its calibration was written with; "
                "run `kvmap collect` again, with --force to replace it"
            )
        return path

    @cached_property
    def sequences(self) -> dict[str, Tensor]:
        """Return `token_ids` [N, T] and `held_out` [N].

        Raises:
            UsageError: They are not of the index's shape.
        """
        artifact = artifacts.open_artifact(self.file(TOKENS, "tokens"), "tokens")
        count, length = self.index["sequences"], self.index["length"]
        return {
            "token_ids": read_tensor(artifact, "token_ids", (count, length), (torch.int32,)),
            "held_out": read_tensor(artifact, "held_out", (count,), (torch.bool,)),
        }

    def token_ids(self, split: str) -> Tensor:
        """Return the sequences [N, T] of "train" or "held_out"."""
        members = self.sequences["held_out"] == (split == "held_out")
        return self.sequences["token_ids"][members].long()

    @cached_property
    def _moments(self) -> dict[str, Moments]:
        if not (self.path / MOMENTS).exists():
            return self._moments_from_dump(self.index["options"]["native_head"])
        return self._load_moments()

    def drop_moments(self) -> None:
        """Let go of the moments, where they are in memory; they are read again when asked for."""
        for name in ("_moments", "_moments_with_head"):
            self.__dict__.pop(name, None)

    def _load_moments(self) -> dict[str, Moments]:
        return load_moments(self.file(MOMENTS, "moments"), (self.source, self.target), self.scope)[
            0
        ]

    @cached_property
    def _moments_with_head(self) -> dict[str, Moments]:
        """Return the moments with the head rows added, which without moments lie in the dump."""
        if not self.index["options"]["moments"]:
            return self._moments_from_dump(0)
        geometries = (self.source.geometry, self.target.geometry)
        made = self._load_moments()  # not those that others may read: they are added to
        for name in self.index["heads"]:
            artifact = artifacts.open_artifact(self.file(name), "dump")
            held_out = read_column(artifact, "held_out", torch.bool)
            for split, members in (("train", ~held_out), ("held_out", held_out)):
                if members.any():
                    rows = head_rows(artifact, members, geometries, self.scope.lookback_layers)
                    made[split].update(rows)
        return made

    def _moments_from_dump(self, first: int) -> dict[str, Moments]:
        if not self.index["shards"]:
            raise UsageError(
                f"{self.path}: has neither moments nor a dump; run `kvmap collect` again"
            )
        geometries = (self.source.geometry, self.target.geometry)
        made = {split: empty_moments(*geometries, self.scope) for split in SPLITS}
        for rows, position, sequence in self.shards():
            out = self.sequences["held_out"][sequence]
            for split, members in (("train", ~out), ("held_out", out)):
                made[split].update(rows, (members & (position >= first)).nonzero()[:, 0])
        return made

    def shards(self):
        """Yield (rows, position [n], sequence [n]) of each dumped shard."""
        for shard in self.index["shards"]:
            paths = (self.file(shard["source"]), self.file(shard["target"]))
            models, late = (self.source, self.target), self.scope.lookback_layers
            rows, position, sequence = load_rows(*paths, models, late)
            for found, name in ((sequence, "sequences"), (position, "length")):
                if bool(((found < 0) | (found >= self.index[name])).any()):
                    raise UsageError(
                        f"{paths[0]}: holds tokens of sequences that this calibration has not; "
                        "run `kvmap collect` again"
                    )
            yield rows, position, sequence

    def moments(self, split: str, with_head: bool = False) -> Moments:
        """Return the moments of "train" or "held_out".

        Args:
            with_head: Count the first tokens in, which are kept apart.

        Raises:
            UsageError: They are not sound, or of no rows at all.
        """
        made = (self._moments_with_head if with_head else self._moments)[split]
        if any(bool(made.tensors[f"{group.name}.count"] < 1) for group in made.groups):
            raise UsageError(
                f"{self.path}: keeps no {split} rows after the first tokens, found "
                f"{self.index['length']} tokens in a sequence, one in "
                f"{self.index['options']['stride']} kept; run `kvmap collect` with a larger "
                "--length or a smaller --stride"
            )
        return made


_OPTIONS = {
    "heads": str,
    "joint": bool,
    "dump": bool,
    "moments": bool,
    "held_out": float,
    "tokens_digest": str,
    "text": dict,
}
# The least that a number may be.
_LEAST = {"sequences": 1, "length": 1, "stride": 1, "shard": 1, "native_head": 0}
_MOST = 2**31
_DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in FLOATS)


def _check_index(index: dict[str, Any]) -> None:
    """Check what is read of an index; its files must lie in its own folder.

    Raises:
        ValueError: Or whatever a missing key or a wrong type raises.
    """
    options, shards, heads = index["options"], index["shards"], index["heads"]
    own = ("text", "tokens_digest", "sequences", "length")
    fields = options | {name: index[name] for name in own}
    for name, kind in _OPTIONS.items():
        if type(fields[name]) is not kind:
            raise ValueError(f"{name} is no {kind.__name__}")
    counts = {name: (fields[name], least) for name, least in _LEAST.items()}
    counts |= {f"sequences of {s['source']}": (s["sequences"], 1) for s in shards}
    for name, (number, least) in counts.items():
        if type(number) is not int or not least <= number < _MOST:
            raise ValueError(f"{name} is no number from {least}")
    if not 0 < options["held_out"] < 1 or options["heads"] not in ("all", "matched"):
        raise ValueError("held_out is no share, or heads neither all nor matched")
    if any(str(index[side]["dtype"]) not in _DTYPES for side in ("source", "target")):
        raise ValueError(f"a dtype is none of {', '.join(_DTYPES)}")
    names = [shard[side] for shard in shards for side in ("source", "target")] + heads
    for name in names:
        if not FILE.fullmatch(name):
            raise ValueError(f"{name[:40]!r} is no file of a calibration")
    apart = options["moments"] and options["native_head"] > 0
    if len(set(names)) < len(names) or (bool(shards), bool(heads)) != (options["dump"], apart):
        raise ValueError("the files are not those that the options keep, each once")
    if [*map(type, index["digests"])] != [str] * len(files_of(index)):
        raise ValueError("the digests are not one for each file")


def _check_scope(scope: Scope, source: Geometry, target: Geometry) -> None:
    """Check that the layers an index names are its models'.

    Raises:
        ValueError: They are not.
    """
    if scope.layers is not None and not are_layers_of(scope.layers, source, target):
        raise ValueError("the chosen layers are not the models'")
    late = scope.lookback_layers
    if not ascending(late) or late[-1] >= source.layers:
        raise ValueError("the layers of tokens before are not the source's")
