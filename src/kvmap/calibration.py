"""A calibration folder: token ids, dumped rows, moments, and the index that makes it whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmap import artifacts
from kvmap.columns import KINDS, groups
from kvmap.errors import UsageError
from kvmap.geometry import Geometry, Signature, json_digest
from kvmap.moments import Moments, Rows

INDEX = "index.json"
SPLITS = ("train", "held_out")


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
        if not (path / INDEX).exists():
            state = "an unfinished run" if (path / "run.json").exists() else "no calibration"
            raise UsageError(
                f"{path}: found {state}, expected a folder with {INDEX}; "
                "run `kvmap collect` to make it"
            )
        index = artifacts.read_json(path / INDEX, "calibration")
        try:
            source, target = (Signature.from_json(index[side]) for side in ("source", "target"))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path / INDEX}: the index is not sound ({error}); run `kvmap collect` again"
            ) from error
        return cls(path, source, target, index)

    @property
    def digest(self) -> str:
        """What a layer choice or a map was made from."""
        kept = {key: self.index[key] for key in ("options", "text", "tokens_digest")}
        # A model's digest leaves its dtype out, but its rows are rounded to it.
        sides = [[side.digest, side.dtype] for side in (self.source, self.target)]
        return json_digest([kept, *sides])

    @property
    def tokens(self) -> int:
        """Number of tokens both models read."""
        return self.index["sequences"] * self.index["length"]

    @property
    def bytes(self) -> int:
        """Bytes of all its files."""
        return sum(file.stat().st_size for file in self.path.iterdir())

    @cached_property
    def sequences(self) -> dict[str, Tensor]:
        """Return `token_ids` [N, T] and `held_out` [N]."""
        return artifacts.open_artifact(self.path / "tokens.safetensors", "tokens").tensors()

    def token_ids(self, split: str) -> Tensor:
        """Return the sequences [N, T] of "train" or "held_out"."""
        members = self.sequences["held_out"] == (split == "held_out")
        return self.sequences["token_ids"][members].long()

    @cached_property
    def _moments(self) -> dict[str, Moments]:
        path = self.path / "moments.safetensors"
        if not path.exists():
            return self._moments_from_dump(self.index["options"]["native_head"])
        return load_moments(path)[0]

    @cached_property
    def _moments_with_head(self) -> dict[str, Moments]:
        """Return what the dump alone gives: without moments, no head rows were kept apart."""
        return self._moments_from_dump(0)

    def _moments_from_dump(self, first: int) -> dict[str, Moments]:
        if not self.index["shards"]:
            raise UsageError(
                f"{self.path}: has neither moments nor a dump; run `kvmap collect` again"
            )
        options = self.index["options"]
        made = {
            split: empty_moments(
                self.source.geometry, self.target.geometry, options["heads"], options["joint"]
            )
            for split in SPLITS
        }
        for rows, position, sequence in self.shards():
            out = self.sequences["held_out"][sequence]
            for split, members in (("train", ~out), ("held_out", out)):
                kept = members & (position >= first)
                made[split].update(
                    Rows({n: tuple(t[kept] for t in ts) for n, ts in rows.entries.items()})
                )
        return made

    def shards(self):
        """Yield (rows, position [n], sequence [n]) of each dumped shard."""
        for shard in self.index["shards"]:
            yield load_rows(self.path / shard["source"], self.path / shard["target"])

    def moments(self, split: str, with_head: bool = False) -> Moments:
        """Return the moments of "train" or "held_out".

        Args:
            with_head: Count the first tokens in, which are kept apart.
        """
        if not with_head:
            return self._moments[split]
        if not self.index["options"]["moments"]:
            return self._moments_with_head[split]
        geometries = (self.source.geometry, self.target.geometry)
        made = empty_moments(
            *geometries, self.index["options"]["heads"], self.index["options"]["joint"]
        )
        made.merge(self._moments[split])
        for name in self.index["heads"]:
            artifact = artifacts.open_artifact(self.path / name, "dump")
            members = artifact.tensor("held_out") == (split == "held_out")
            if members.any():
                made.update(_head_rows(artifact, members, geometries))
        return made


def _head_rows(
    artifact: artifacts.Artifact, members: Tensor, geometries: tuple[Geometry, Geometry]
) -> Rows:
    return Rows(
        {
            (side, kind): tuple(
                artifact.tensor(f"{side}.{kind}.{layer}")[members]
                for layer in range(geometry.layers)
            )
            for side, geometry in zip(("source", "target"), geometries, strict=True)
            for kind in KINDS
        }
    )


def empty_moments(source: Geometry, target: Geometry, heads: str, joint: bool) -> Moments:
    """Return accumulators for a pair."""
    sizes = {"source": source.head_size, "target": target.head_size}
    return Moments(groups(source, target, heads, joint), sizes)


def save_moments(path: Path, moments: dict[str, Moments], metadata: dict[str, Any]) -> Path:
    """Write train and held-out moments as an artifact of kind "moments"."""
    tensors = {
        f"{split}.{name}": t
        for split, found in moments.items()
        for name, t in found.tensors.items()
    }
    return artifacts.write(path, "moments", tensors, metadata)


def load_moments(path: Path) -> tuple[dict[str, Moments], dict[str, Any]]:
    """Read train and held-out moments and their metadata."""
    artifact = artifacts.open_artifact(path, "moments")
    geometries = tuple(
        Signature.from_json(artifact.metadata[side]).geometry for side in ("source", "target")
    )
    made = {}
    for split in SPLITS:
        made[split] = empty_moments(
            *geometries, artifact.metadata["heads"], artifact.metadata["joint"]
        )
        for name in made[split].tensors:
            made[split].tensors[name] = artifact.tensor(f"{split}.{name}")
    return made, artifact.metadata


def load_rows(source: Path, target: Path) -> tuple[Rows, Tensor, Tensor]:
    """Read one shard: rows of both models, their positions and sequence numbers [n].

    Raises:
        UsageError: The two files hold different tokens.
    """
    opened = {
        "source": artifacts.open_artifact(source, "dump"),
        "target": artifacts.open_artifact(target, "dump"),
    }
    entries = {}
    for side, artifact in opened.items():
        layers = Signature.from_json(artifact.metadata["model"]).geometry.layers
        for kind in KINDS:
            entries[side, kind] = tuple(
                artifact.tensor(f"{kind}.{layer}") for layer in range(layers)
            )
    places = {side: (a.tensor("position"), a.tensor("sequence")) for side, a in opened.items()}
    if not all(torch.equal(*pair) for pair in zip(places["source"], places["target"], strict=True)):
        raise UsageError(f"{source} and {target} hold different tokens; run `kvmap collect` again")
    return Rows(entries), *places["source"]
