"""Presets of `kvmap fit`: which inputs, heads, layers and exact parts a map has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvmap.columns import head_assignment
from kvmap.errors import UsageError
from kvmap.geometry import Geometry
from kvmap.mapping import MapOptions


@dataclass(frozen=True)
class Recipe:
    """A preset: how to choose layers, how to fit, and the map's options.

    Attributes:
        k: Source layers per target layer, or "auto".
        ridge: Relative λ, or "auto".
        options: Inputs, heads and exact parts.
        assign: How matched heads are paired where the options do not say: by "ratio" of their
            numbers, or the "best" by held-out R² where the moments know all pairs.
        method: A name in `kvmap.fit.METHODS`.
        weights: "none", or "attention" to count rows by how much later queries read them.
        rank: Of every weight, kept as two factors, from 1; below 1 the share by which the error
            on held-out rows may grow for it; None keeps weights whole.
        width: Of the networks of a method that has some; None for the method's own.
        polish: Steps of gradient descent on the target's own predictions afterwards.
    """

    k: int | str
    ridge: float | str
    options: MapOptions
    assign: str = "ratio"
    method: str = "closed-form"
    weights: str = "none"
    rank: float | None = None
    width: int | None = None
    polish: int = 0


_BEST = MapOptions(
    joint=True,
    anchor=True,
    lookback=3,
    lookback_layers=(),
    exact_first=True,
    native_head=4,
    native_tail=64,
)

RECIPES = {
    # arXiv 2608.03893: all heads, no exact parts, hold-back of one token.
    "paper": Recipe(8, 1e-2, MapOptions()),
    # arXiv 2609.00891: each head reads its own, rows count by how they are read.
    "cachebridge": Recipe(8, 1e-2, MapOptions(heads="matched"), weights="attention"),
    # The best closed form, in two factors where they cost less and lose nothing to speak of.
    "kvmap": Recipe("auto", "auto", _BEST, rank=0.01),
    # The same with each head reading its own, and layer 0 alone of the tokens before: about H times
    # fewer weights.
    "kvmap-matched": Recipe(
        4, "auto", replace(_BEST, heads="matched", lookback_layers=(0,)), assign="best"
    ),
    # As good to a tenth of the error: several times fewer weights and FLOPs.
    "kvmap-fast": Recipe("auto", "auto", _BEST, rank=0.1),
    # The target's two lowest layers over the whole context, about 2/L of a prefill: exact where
    # errors spread furthest.
    "kvmap-native": Recipe("auto", "auto", replace(_BEST, native_layers=2), rank=0.01),
    # The best there is: whole weights, and minutes more to make.
    "kvmap-max": Recipe("auto", "auto", _BEST, polish=256),
}
DEFAULT_RECIPE = "kvmap"


def recipe(name: str) -> Recipe:
    """Return a preset by name.

    Raises:
        UsageError: No such preset.
    """
    if name not in RECIPES:
        raise UsageError(f"no recipe {name!r}; expected one of {', '.join(RECIPES)}")
    return RECIPES[name]


def with_assignment(options: MapOptions, source: Geometry, target: Geometry) -> MapOptions:
    """Fill in which source head each target head reads, where the options do not say.

    Raises:
        UsageError: They say it of heads that are not there.
    """
    given = options.assignment
    if given and (len(given) != target.kv_heads or max(given) >= source.kv_heads):
        raise UsageError(
            f"heads {','.join(map(str, given))} are assigned, expected {target.kv_heads} numbers "
            f"from 0 to {source.kv_heads - 1}; give one source head for each target head"
        )
    if options.heads != "matched" or given:
        return options
    return replace(options, assignment=head_assignment(source.kv_heads, target.kv_heads))


def require_mapped(options: MapOptions, target: Geometry) -> None:
    """Check that a map has layers left to map.

    Raises:
        UsageError: The target runs them all itself.
    """
    if options.exact_layers >= target.layers:
        raise UsageError(
            f"--native-layers {options.exact_layers} leaves nothing to map: the target has "
            f"{target.layers} layers; give fewer"
        )


def require_layers(k: int, source: Geometry, name: str) -> None:
    """Check that a source has as many layers as each target layer is to read.

    Raises:
        UsageError: It has fewer.
    """
    if k > source.layers:
        raise UsageError(
            f"found -k {k}, {name} has {source.layers} layers; give at most {source.layers}, "
            "or auto"
        )


def with_lookback(made: Recipe, kept: tuple[int, ...]) -> Recipe:
    """Fill in which layers of the tokens before are read: those that are kept."""
    if made.options.lookback_layers:
        return made
    return replace(made, options=replace(made.options, lookback_layers=kept))


def describe(made: Recipe) -> dict[str, Any]:
    """Return a recipe as plain JSON data."""
    data = asdict(made)
    for name in ("assignment", "lookback_layers"):
        data["options"][name] = list(data["options"][name])
    return data


def preset_of(provenance: Mapping[str, Any]) -> str | None:
    """Return the preset that a map says it was fitted by, whatever its k.

    Returns:
        "other" where it is none of them; None where the map does not say.
    """
    asked = provenance.get("recipe")
    if not isinstance(asked, dict):
        return None
    late = tuple(asked["options"]["lookback_layers"])
    presets = {name: describe(with_lookback(one, late)) for name, one in RECIPES.items()}
    names = [name for name, one in presets.items() if _but_k(one) == _but_k(asked)]
    return names[0] if names else "other"


def _but_k(described: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe without what is counted or assigned for a pair."""
    return {**described, "k": None, "options": {**described["options"], "assignment": []}}
