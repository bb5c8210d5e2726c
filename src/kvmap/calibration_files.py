"""The files of a calibration: moments and rows, written, and read with their shapes checked."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmap import artifacts, header
from kvmap.chosen import Layers, chosen_groups
from kvmap.columns import BACK, KINDS, entry_sides, groups, head_sizes
from kvmap.errors import UsageError
from kvmap.geometry import Geometry, Signature
from kvmap.moments import ACCUMULATE, Moments, Rows

SPLITS = ("train", "held_out")
# Names in a calibration's folder: without an index there is none, a run's record is of one begun.
INDEX, RUN, TOKENS, MOMENTS = (
    header.INDEX,
    "run.json",
    "tokens.safetensors",
    "moments.safetensors",
)
# Of rows: what a model may run in.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Scope:
    """Which moments are kept.

    Attributes:
        heads: "all" or "matched".
        joint: Keys beside values, the anchor and the tokens before.
        layers: Source layers of each target layer; None keeps all.
        lookback_layers: Source layers that are kept of the tokens before.
    """

    heads: str
    joint: bool
    layers: Layers | None = None
    lookback_layers: tuple[int, ...] = (0,)


def head_rows(
    artifact: artifacts.Artifact,
    members: Tensor,
    geometries: tuple[Geometry, Geometry],
    lookback_layers: tuple[int, ...],
) -> Rows:
    """Return the rows of first tokens, which are kept apart, of some members [n] of a file.

    Raises:
        UsageError: The file holds no such rows.
    """
    return Rows(
        {
            (side, kind): {
                layer: _entries(artifact, f"{side}.{kind}.{layer}", len(members), geometry)[members]
                for layer in layers
            }
            for side, geometry, layers in entry_sides(*geometries, lookback_layers)
            for kind in KINDS
        }
    )


def empty_moments(
    source: Geometry,
    target: Geometry,
    scope: Scope,
    products: torch.dtype = ACCUMULATE,
    device: str = "cpu",
) -> Moments:
    """Return accumulators for a pair.

    Args:
        products: Dtype in which rows are multiplied before they are added up in float64.
    """
    found = groups(source, target, scope.heads, scope.joint, scope.lookback_layers)
    sizes = head_sizes(source, target)
    if scope.layers is not None:
        found = chosen_groups(found, scope.layers, sizes)
    return Moments(found, sizes, device, products)


def scope_of(options: dict[str, Any]) -> Scope:
    """Return which moments recorded options keep."""
    layers = options.get("layers")
    return Scope(
        options["heads"],
        options["joint"],
        layers and tuple(tuple(map(operator.index, row)) for row in layers),
        tuple(map(operator.index, options["lookback_layers"])),
    )


def files_of(index: dict[str, Any]) -> list[str]:
    """Return the names of a calibration's files, its index apart, in the order of its digests."""
    moments = [MOMENTS] if index["options"]["moments"] else []
    rows = [shard[side] for shard in index["shards"] for side in ("source", "target")]
    return [TOKENS, *moments, *rows, *index["heads"]]


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write what makes a folder a calibration: its index, with the digest of each of its files."""
    digests = [header.read_safetensors(folder / name)["sha256"] for name in files_of(index)]
    artifacts.write_json(folder / INDEX, index | {"digests": digests}, private=True)


def save_moments(path: Path, moments: dict[str, Moments], metadata: dict[str, Any]) -> Path:
    """Write train and held-out moments as an artifact of kind "moments", for the owner alone."""
    tensors = {
        f"{split}.{name}": t
        for split, found in moments.items()
        for name, t in found.tensors.items()
    }
    return artifacts.write(path, "moments", tensors, metadata, private=True)


def load_moments(
    path: Path, models: tuple[Signature, Signature], scope: Scope
) -> tuple[dict[str, Moments], dict[str, Any]]:
    """Read train and held-out moments and their metadata.

    Raises:
        UsageError: The file is no sound moments artifact, or of other models, or keeps others.
    """
    artifact = artifacts.open_artifact(path, "moments")
    with header.sound(path, "moments"):
        found = [artifact.metadata[side] for side in ("source", "target")]
        kept = scope_of(artifact.metadata)
    for model, expected in zip(found, models, strict=True):
        require_model(path, model, expected)
    if kept != scope:
        raise UsageError(
            f"{path}: keeps other heads or layers than its calibration says; "
            "run `kvmap collect` again"
        )
    made = {}
    for split in SPLITS:
        made[split] = empty_moments(*(model.geometry for model in models), scope, device="meta")
        for name, empty in made[split].tensors.items():
            made[split].tensors[name] = read_tensor(
                artifact, f"{split}.{name}", tuple(empty.shape), (ACCUMULATE,)
            )
    return made, artifact.metadata


def load_rows(
    source: Path,
    target: Path,
    models: tuple[Signature, Signature],
    lookback_layers: tuple[int, ...],
) -> tuple[Rows, Tensor, Tensor]:
    """Read one shard: rows of both models, their positions and sequence numbers [n].

    Args:
        lookback_layers: Layers that the source's file holds of the tokens before.

    Raises:
        UsageError: The two files hold different tokens, or rows of other models.
    """
    rows, position, sequence = load_side(source, "source", models[0], lookback_layers)
    others, *places = load_side(target, "target", models[1], ())
    if not all(map(torch.equal, (position, sequence), places)):
        raise UsageError(f"{source} and {target} hold different tokens; run `kvmap collect` again")
    return Rows(rows | others), position, sequence


def load_side(
    path: Path, side: str, model: Signature, lookback_layers: tuple[int, ...]
) -> tuple[dict[tuple[str, str], dict[int, Tensor]], Tensor, Tensor]:
    """Read one model's file of a shard: entries of `Rows`, positions and sequence numbers [n].

    Args:
        lookback_layers: Layers that the file holds of the tokens before.

    Raises:
        UsageError: It holds rows of another model, or none.
    """
    artifact = artifacts.open_artifact(path, "dump")
    require_model(path, artifact.metadata.get("model"), model)
    position = read_column(artifact, "position", torch.int64)
    count, geometry = len(position), model.geometry
    sequence = read_tensor(artifact, "sequence", (count,), (torch.int64,))
    entries = {
        (side, kind): {
            at: _entries(artifact, f"{kind}.{at}", count, geometry) for at in range(geometry.layers)
        }
        for kind in KINDS
    }
    for late in BACK if lookback_layers else ():
        for kind in KINDS:
            entries[late, kind] = {
                at: _entries(artifact, f"{late}.{kind}.{at}", count, geometry)
                for at in lookback_layers
            }
    return entries, position, sequence


def _entries(artifact: artifacts.Artifact, name: str, rows: int, geometry: Geometry) -> Tensor:
    """Return one layer's rows [n, H, D]."""
    return read_tensor(artifact, name, (rows, geometry.kv_heads, geometry.head_size), FLOATS)


def read_column(artifact: artifacts.Artifact, name: str, dtype: torch.dtype) -> Tensor:
    """Read what a file holds one of for each of its rows, [n]; see `read_tensor`."""
    return read_tensor(artifact, name, artifact.shape(name)[:1] or (0,), (dtype,))


def read_tensor(
    artifact: artifacts.Artifact,
    name: str,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
) -> Tensor:
    """Read a tensor of a shape, which the file's header says first, and of one of some dtypes.

    Raises:
        UsageError: It is of another, or not there.
    """
    problem = f"{name!r} has shape {artifact.shape(name)}, expected {shape}"
    if artifact.shape(name) == shape:
        tensor = artifact.tensor(name)
        if tensor.dtype in dtypes:
            return tensor
        said, *rest = (str(one).removeprefix("torch.") for one in (tensor.dtype, *dtypes))
        problem = f"{name!r} is of {said}, expected {' or '.join(rest)}"
    raise header.unusable(artifact.path, problem, artifact.kind)


def require_model(path: Path, found: Any, expected: Signature) -> None:
    """Check that a file is of the expected model, and of caches of its shape.

    Raises:
        UsageError: It is of another.
    """
    with header.sound(path, "calibration"):
        model = Signature.from_json(found)
    expected.require_same(model, f"{path}: its calibration's model", "run `kvmap collect` again")
