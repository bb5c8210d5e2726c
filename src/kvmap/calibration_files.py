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
    """Return the rows of first tokens, which are kept apart, of some members [n] of a file."""
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
        made[split] = empty_moments(*geometries, scope, device="meta")
        for name, empty in made[split].tensors.items():
            require_shape(artifact, f"{split}.{name}", tuple(empty.shape))
            made[split].tensors[name] = artifact.tensor(f"{split}.{name}")
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
    opened = {
        "source": artifacts.open_artifact(source, "dump"),
        "target": artifacts.open_artifact(target, "dump"),
    }
    entries = {}
    for (side, artifact), expected in zip(opened.items(), models, strict=True):
        require_model(artifact.path, artifact.metadata.get("model"), expected)
        for name in ("position", "sequence"):
            require_shape(artifact, name, (len(artifact.tensor("position")),))
        for kind in KINDS:
            rows = len(artifact.tensor("position"))
            entries[side, kind] = {
                at: _entries(artifact, f"{kind}.{at}", rows, expected.geometry)
                for at in range(expected.geometry.layers)
            }
    count, geometry = len(opened["source"].tensor("position")), models[0].geometry
    for side in BACK:
        for kind in KINDS:
            entries[side, kind] = {
                at: _entries(opened["source"], f"{side}.{kind}.{at}", count, geometry)
                for at in lookback_layers
            }
    places = {side: (a.tensor("position"), a.tensor("sequence")) for side, a in opened.items()}
    if not all(torch.equal(*pair) for pair in zip(places["source"], places["target"], strict=True)):
        raise UsageError(f"{source} and {target} hold different tokens; run `kvmap collect` again")
    return Rows(entries), *places["source"]


def _entries(artifact: artifacts.Artifact, name: str, rows: int, geometry: Geometry) -> Tensor:
    """Return one layer's rows [n, H, D]."""
    require_shape(artifact, name, (rows, geometry.kv_heads, geometry.head_size))
    return artifact.tensor(name)


def require_shape(artifact: artifacts.Artifact, name: str, shape: tuple[int, ...]) -> None:
    """Check a tensor\'s shape by the file\'s header.

    Raises:
        UsageError: It is another.
    """
    if artifact.shape(name) != shape:
        raise header.unusable(
            artifact.path,
            f"{name!r} has shape {artifact.shape(name)}, expected {shape}",
            artifact.kind,
        )


def require_model(path: Path, found: Any, expected: Signature) -> None:
    """Check that a file is of the expected model.

    Raises:
        UsageError: It is of another.
    """
    with header.sound(path, "calibration"):
        model = Signature.from_json(found)
    if model.digest != expected.digest:
        raise UsageError(
            f"{path}: is of {model.name} (digest {model.digest[:12]}), expected {expected.name} "
            f"(digest {expected.digest[:12]}); run `kvmap collect` again"
        )
