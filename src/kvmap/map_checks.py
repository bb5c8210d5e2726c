"""Whether a map that was read is sound: its weights have the shapes that its options say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvmap import header
from kvmap.affine import Affine
from kvmap.columns import KINDS
from kvmap.errors import UsageError
from kvmap.map_options import weight_shape

if TYPE_CHECKING:
    from kvmap.mapping import CacheMap


def check_weights(made: CacheMap, path: Path | str) -> None:
    """Check a map that was read from a file.

    Raises:
        UsageError: Naming the first part that is not as it should be.
    """
    with header.sound(path, "map"):
        _check_means(made.provenance.get("r2") or {})
    source, target = made.source.geometry, made.target.geometry
    for name, table in made.r2.items():
        if table.shape != (target.layers, target.kv_heads):
            raise UsageError(
                f"{path}: r2.{name} is {tuple(table.shape)}, expected "
                f"{(target.layers, target.kv_heads)}; fit the map again"
            )
    _check_inputs(made, path)
    if len(made.layers) != target.layers or made.options.exact_layers > target.layers:
        raise UsageError(
            f"{path}: found {len(made.layers)} layers and {made.options.exact_layers} exact ones, "
            f"expected {target.layers}, exact ones among them; fit the map again"
        )
    for index, layer in enumerate(made.layers):
        if (layer is None) != (index < made.options.exact_layers):
            raise UsageError(
                f"{path}: layer {index} is {'not ' if layer is None else ''}mapped, unlike what "
                "the map's options say; fit the map again"
            )
        if layer and not all(0 <= s < source.layers for s in layer.source_layers):
            raise UsageError(
                f"{path}: layer {index} reads source layers {list(layer.source_layers)}, expected "
                f"0 to {source.layers - 1} of {made.source.name}; fit the map again"
            )
        for kind in KINDS if layer else ():
            part = layer.of(kind)
            weight = weight_shape(made.options, len(layer.source_layers), source, target)
            for name, expected in _part_shapes(part, *weight).items():
                found = tuple(part.tensors()[name].shape)
                if found != expected:
                    raise UsageError(
                        f"{path}: layer {index}'s {kind} {name} is {found}, "
                        f"expected {expected}; fit the map again"
                    )


def _check_means(r2: dict[str, dict[str, float | None]]) -> None:
    """Check the means by split and kind, which a report repeats.

    Raises:
        ValueError: Or whatever else a record of another form raises.
    """
    for split, means in r2.items():
        for kind in KINDS:
            if means[kind] is not None and type(means[kind]) not in (int, float):
                raise ValueError(f"the R² of {split} {kind}s is no number")


def _check_inputs(made: CacheMap, path: Path | str) -> None:
    """Check that what all layers read is there: the source's heads, and its layers."""
    source, target = made.source.geometry, made.target.geometry
    if made.options.heads == "matched":
        heads = made.options.assignment
        if len(heads) != target.kv_heads or not all(0 <= h < source.kv_heads for h in heads):
            raise UsageError(
                f"{path}: assigns heads {list(heads)}, expected {target.kv_heads} from 0 to "
                f"{source.kv_heads - 1}; fit the map again"
            )
    if (last := made.options.lookback_layers[-1]) >= source.layers:
        raise UsageError(
            f"{path}: reads layer {last} of the tokens before, expected 0 to {source.layers - 1} "
            f"of {made.source.name}; fit the map again"
        )


def _part_shapes(part: Affine, groups: int, p: int, q: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes a part's tensors must have; ranks and hidden widths are its own."""
    rank = part.weight.shape[-1]
    shapes = {"weight": (groups, p, q if part.up is None else rank), "bias": (groups, q)}
    if part.up is not None:
        shapes["up"] = (groups, rank, q)
    width = p
    for at, step in enumerate(part.network):
        after = q if at == len(part.network) - 1 else step.weight.shape[-1]
        shapes[f"network.{at}.weight"] = (groups, width, after)
        shapes[f"network.{at}.bias"] = (groups, after)
        width = after
    return shapes
