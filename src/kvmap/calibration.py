"""A calibration folder: token ids, dumped rows, moments, and the index that makes it whole."""

from __future__ import annotations

import operator
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmap import artifacts, header
from kvmap.chosen import Layers, chosen_groups
from kvmap.columns import BACK, KINDS, groups, head_sizes
from kvmap.errors import UsageError
from kvmap.geometry import Geometry, Signature, json_digest
from kvmap.moments import ACCUMULATE, Moments, Rows

INDEX = "index.json"
FILE = re.compile(r"(source|target|head)-\d+\.safetensors")
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
        if not os.path.exists(path / INDEX):  # which takes a name of any length
            state = "an unfinished run" if os.path.exists(path / "run.json") else "no calibration"
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
        path = self.path / "tokens.safetensors"
        artifact = artifacts.open_artifact(path, "tokens")
        count = self.index["sequences"]
        for name, shape in (("token_ids", (count, self.index["length"])), ("held_out", (count,))):
            _require_shape(artifact, name, shape)
        return artifact.tensors()

    def token_ids(self, split: str) -> Tensor:
        """Return the sequences [N, T] of "train" or "held_out"."""
        members = self.sequences["held_out"] == (split == "held_out")
        return self.sequences["token_ids"][members].long()

    @cached_property
    def _moments(self) -> dict[str, Moments]:
        path = self.path / "moments.safetensors"
        if not path.exists():
            return self._moments_from_dump(self.index["options"]["native_head"])
        made, metadata = load_moments(path)
        for side, expected in (("source", self.source), ("target", self.target)):
            _require_model(path, metadata[side], expected)
        return made

    @cached_property
    def _moments_with_head(self) -> dict[str, Moments]:
        """Return what the dump alone gives: without moments, no head rows were kept apart."""
        return self._moments_from_dump(0)

    def _moments_from_dump(self, first: int) -> dict[str, Moments]:
        if not self.index["shards"]:
            raise UsageError(
                f"{self.path}: has neither moments nor a dump; run `kvmap collect` again"
            )
        geometries = (self.source.geometry, self.target.geometry)
        scope = scope_of(self.index["options"])
        made = {split: empty_moments(*geometries, *scope) for split in SPLITS}
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
            paths = (self.path / shard["source"], self.path / shard["target"])
            rows, position, sequence = load_rows(*paths, (self.source, self.target))
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
        if not with_head:
            return self._moments[split]
        if not self.index["options"]["moments"]:
            return self._moments_with_head[split]
        geometries = (self.source.geometry, self.target.geometry)
        made = empty_moments(*geometries, *scope_of(self.index["options"]))
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
    source, target = geometries
    sides = [("source", source, source.layers), ("target", target, target.layers)]
    sides += [(side, source, 1) for side in BACK]
    return Rows(
        {
            (side, kind): tuple(
                _entries(artifact, f"{side}.{kind}.{layer}", len(members), geometry)[members]
                for layer in range(layers)
            )
            for side, geometry, layers in sides
            for kind in KINDS
        }
    )


def empty_moments(
    source: Geometry,
    target: Geometry,
    heads: str,
    joint: bool,
    layers: Layers | None = None,
    products: torch.dtype = ACCUMULATE,
) -> Moments:
    """Return accumulators for a pair; of all layers, or of what a choice of them reads.

    Args:
        products: Dtype in which rows are multiplied before they are added up in float64.
    """
    found, sizes = groups(source, target, heads, joint), head_sizes(source, target)
    if layers is not None:
        found = chosen_groups(found, layers, sizes)
    return Moments(found, sizes, products=products)


def scope_of(options: dict[str, Any]) -> tuple[str, bool, Layers | None]:
    """Return which moments recorded options keep: heads, joint, chosen layers."""
    layers = options.get("layers")
    return (
        options["heads"],
        options["joint"],
        layers and tuple(tuple(map(operator.index, row)) for row in layers),
    )


def save_moments(path: Path, moments: dict[str, Moments], metadata: dict[str, Any]) -> Path:
    """Write train and held-out moments as an artifact of kind "moments"."""
    tensors = {
        f"{split}.{name}": t
        for split, found in moments.items()
        for name, t in found.tensors.items()
    }
    return artifacts.write(path, "moments", tensors, metadata)


def load_moments(path: Path) -> tuple[dict[str, Moments], dict[str, Any]]:
    """Read train and held-out moments and their metadata.

    Raises:
        UsageError: The file is no sound moments artifact, or its shapes are not its models'.
    """
    artifact = artifacts.open_artifact(path, "moments")
    with header.sound(path, "moments"):
        geometries = tuple(
            Signature.from_json(artifact.metadata[side]).geometry for side in ("source", "target")
        )
        scope = scope_of(artifact.metadata)
    made = {}
    for split in SPLITS:
        made[split] = empty_moments(*geometries, *scope)
        for name, empty in made[split].tensors.items():
            _require_shape(artifact, f"{split}.{name}", tuple(empty.shape))
            made[split].tensors[name] = artifact.tensor(f"{split}.{name}")
    return made, artifact.metadata


def load_rows(
    source: Path, target: Path, models: tuple[Signature, Signature]
) -> tuple[Rows, Tensor, Tensor]:
    """Read one shard: rows of both models, their positions and sequence numbers [n].

    Raises:
        UsageError: The two files hold different tokens, or rows of other models.
    """
    opened = {
        "source": artifacts.open_artifact(source, "dump"),
        "target": artifacts.open_artifact(target, "dump"),
    }
    entries = {}
    for (side, artifact), expected in zip(opened.items(), models, strict=True):
        _require_model(artifact.path, artifact.metadata.get("model"), expected)
        for name in ("position", "sequence"):
            _require_shape(artifact, name, (len(artifact.tensor("position")),))
        for kind in KINDS:
            entries[side, kind] = tuple(
                _entries(
                    artifact, f"{kind}.{at}", len(artifact.tensor("position")), expected.geometry
                )
                for at in range(expected.geometry.layers)
            )
    count, geometry = len(opened["source"].tensor("position")), models[0].geometry
    for side in BACK:
        for kind in KINDS:
            entries[side, kind] = (_entries(opened["source"], f"{side}.{kind}", count, geometry),)
    places = {side: (a.tensor("position"), a.tensor("sequence")) for side, a in opened.items()}
    if not all(torch.equal(*pair) for pair in zip(places["source"], places["target"], strict=True)):
        raise UsageError(f"{source} and {target} hold different tokens; run `kvmap collect` again")
    return Rows(entries), *places["source"]


def _entries(artifact: artifacts.Artifact, name: str, rows: int, geometry: Geometry) -> Tensor:
    """Return one layer's rows [n, H, D]."""
    _require_shape(artifact, name, (rows, geometry.kv_heads, geometry.head_size))
    return artifact.tensor(name)


def _require_shape(artifact: artifacts.Artifact, name: str, shape: tuple[int, ...]) -> None:
    if artifact.shape(name) != shape:
        raise header.unusable(
            artifact.path,
            f"{name!r} has shape {artifact.shape(name)}, expected {shape}",
            artifact.kind,
        )


def _require_model(path: Path, found: Any, expected: Signature) -> None:
    with header.sound(path, "calibration"):
        model = Signature.from_json(found)
    if model.digest != expected.digest:
        raise UsageError(
            f"{path}: is of {model.name} (digest {model.digest[:12]}), expected {expected.name} "
            f"(digest {expected.digest[:12]}); run `kvmap collect` again"
        )


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
    layers = scope_of(options)[2]
    shape = [index[side]["geometry"]["layers"] for side in ("target", "source")]
    if layers is not None and (
        len(layers) != shape[0] or not all(0 <= s < shape[1] for row in layers for s in row)
    ):
        raise ValueError("the chosen layers are not the models'")
