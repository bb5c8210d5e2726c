"""A calibration folder: token ids, dumped rows, moments, and the index that makes it whole."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from kvmap import artifacts, header
from kvmap.calibration_files import (
    INDEX,
    MOMENTS,
    RUN,
    SPLITS,
    TOKENS,
    Scope,
    empty_moments,
    head_rows,
    load_moments,
    load_rows,
    require_model,
    require_shape,
    scope_of,
)
from kvmap.errors import UsageError
from kvmap.geometry import Signature, json_digest
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
        with header.sound(path / INDEX, "calibration"):
            source, target = (Signature.from_json(index[side]) for side in ("source", "target"))
            _check_index(index)
        return cls(path, source, target, index)

    @property
    def digest(self) -> str:
        """What a layer choice or a map was made from."""
        kept = {key: self.index[key] for key in ("options", "text", "tokens_digest")}
        # A model's digest leaves its dtype out, but its rows are rounded to it.
        sides = [[side.digest, side.dtype] for side in (self.source, self.target)]
        return json_digest([kept, *sides])

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

    @cached_property
    def sequences(self) -> dict[str, Tensor]:
        """Return `token_ids` [N, T] and `held_out` [N].

        Raises:
            UsageError: They are not of the index's shape.
        """
        path = self.path / TOKENS
        artifact = artifacts.open_artifact(path, "tokens")
        count = self.index["sequences"]
        for name, shape in (("token_ids", (count, self.index["length"])), ("held_out", (count,))):
            require_shape(artifact, name, shape)
        return artifact.tensors()

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
        path = self.path / MOMENTS
        made, metadata = load_moments(path)
        for side, expected in (("source", self.source), ("target", self.target)):
            require_model(path, metadata[side], expected)
        return made

    @cached_property
    def _moments_with_head(self) -> dict[str, Moments]:
        """Return the moments with the head rows added, which without moments lie in the dump."""
        if not self.index["options"]["moments"]:
            return self._moments_from_dump(0)
        geometries = (self.source.geometry, self.target.geometry)
        made = self._load_moments()  # not those that others may read: they are added to
        for name in self.index["heads"]:
            artifact = artifacts.open_artifact(self.path / name, "dump")
            held_out = artifact.tensor("held_out")
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
            paths = (self.path / shard["source"], self.path / shard["target"])
            models, late = (self.source, self.target), self.scope.lookback_layers
            rows, position, sequence = load_rows(*paths, models, late)
            if not all(0 <= at < self.index["sequences"] for at in sequence.unique().tolist()):
                raise UsageError(
                    f"{paths[0]}: holds sequences that this calibration has not; "
                    "run `kvmap collect` again"
                )
            yield rows, position, sequence

    def moments(self, split: str, with_head: bool = False) -> Moments:
        """Return the moments of "train" or "held_out".

        Args:
            with_head: Count the first tokens in, which are kept apart.
        """
        return (self._moments_with_head if with_head else self._moments)[split]


_OPTIONS = {"stride": int, "native_head": int, "heads": str, "joint": bool}


def _check_index(index: dict[str, Any]) -> None:
    """Check what is read of an index; its files must lie in its own folder.

    Raises:
        ValueError: Or whatever a missing key or a wrong type raises.
    """
    numbers = [index["sequences"], index["length"]]
    if not all(type(number) is int and 0 < number < 2**31 for number in numbers):
        raise ValueError("sequences and length must be numbers from 1")
    options = index["options"] | {"text": index["text"], "digest": index["tokens_digest"]}
    for name, kind in (_OPTIONS | {"dump": bool, "moments": bool, "digest": str}).items():
        if type(options[name]) is not kind:
            raise ValueError(f"{name} is no {kind.__name__}")
    names = [shard[side] for shard in index["shards"] for side in ("source", "target")]
    for name in (*names, *index["heads"]):
        if not FILE.fullmatch(name):
            raise ValueError(f"{name[:40]!r} is no file of a calibration")
    scope = scope_of(options)
    layers = scope.layers
    shape = [index[side]["geometry"]["layers"] for side in ("target", "source")]
    if layers is not None and (
        len(layers) != shape[0] or not all(0 <= s < shape[1] for row in layers for s in row)
    ):
        raise ValueError("the chosen layers are not the models'")
    late = scope.lookback_layers
    if not ascending(late) or late[-1] >= shape[1]:
        raise ValueError("the layers of tokens before are not the source's")
