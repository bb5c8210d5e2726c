"""From the names of two models to a map: collect, choose layers, fit, and what is there is reused.

Where the moments do not fit in memory, layers are chosen on a sample and collected alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvmap import atomic, fit, plan
from kvmap.calibration import Calibration
from kvmap.collect_options import CollectOptions
from kvmap.collect_pair import (
    Loading,
    TextOptions,
    cached_path,
    collect_pair,
    geometries,
    read_text,
    require_room,
    with_scope,
)
from kvmap.errors import UsageError
from kvmap.fit import Recipe
from kvmap.fit.choice import auto_counts
from kvmap.fit.job import Opener
from kvmap.geometry import Geometry, json_digest
from kvmap.layers import load_layers
from kvmap.mapping import CacheMap
from kvmap.pipeline import (
    Progress,
    Text,
    cache_folder,
    cached_layers,
    fit_map,
    open_finished,
    sound_or_none,
)


@dataclass(frozen=True)
class FitRequest:
    """How a map is made from a calibration.

    Attributes:
        recipe: Inputs, heads, exact parts, ridge and k.
        selection: "top" or "greedy".
        layers: An artifact with a choice of layers; None chooses.
        out: Where the map goes; None takes the cache folder.
    """

    recipe: Recipe
    selection: str = "top"
    layers: Path | None = None
    out: Path | None = None


@dataclass(frozen=True)
class FitReport:
    """A fitted map, its files and which stages were not run again."""

    cmap: CacheMap
    path: Path
    layers_path: Path
    k: int
    seconds: float
    reused: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report of `kvmap fit --json`."""
        made = self.cmap.provenance
        return {
            "map": str(self.path),
            "layers": str(self.layers_path),
            "k": self.k,
            "ridge": made["ridge"],
            "r2": made["r2"],
            "rows_per_input": made["rows_per_input"],
            "seconds": self.seconds,
            "reused": list(self.reused),
            "recipe": made["recipe"],
            "parameters": self.cmap.parameters,
        }


def fit_calibration(
    calibration: Calibration,
    request: FitRequest,
    progress: Progress,
    reused: tuple[str, ...] = (),
    openers: tuple[Opener, Opener] | None = None,
) -> FitReport:
    """Choose layers and fit a map, or take both from the cache folder where they are there.

    A calibration of chosen layers is fitted with these.

    Args:
        openers: Load both models where the recipe runs them; by name if not given.
    """
    if request.layers is not None:
        _, layers, record = load_layers(request.layers)
        layers_path, k, known = request.layers, record["k"], False
    elif (recorded := calibration.scope.layers) is not None:
        layers, layers_path, k, known = recorded, calibration.path, max(map(len, recorded)), True
    else:
        choice, layers_path, known = cached_layers(
            calibration, request.recipe, request.selection, None
        )
        layers, k = choice.layers, choice.k
    reused += ("select-layers",) if known else ()
    key = json_digest([calibration.digest, layers, fit.describe(request.recipe)])
    path = request.out or cache_folder() / "maps" / f"{key[:24]}.safetensors"
    cmap = sound_or_none(CacheMap.load, path) if request.out is None else None
    if cmap is not None:
        return FitReport(cmap, path, layers_path, k, 0.0, (*reused, "fit"))
    fitted = fit_map(calibration, layers, request.recipe, progress, openers)
    atomic.make_folder(path.parent)
    fitted.cmap.save(path)
    return FitReport(fitted.cmap, path, layers_path, k, fitted.seconds, reused)


def fit_pair(
    names: tuple[str, str],
    text_options: TextOptions,
    options: CollectOptions,
    request: FitRequest,
    loading: Loading,
    progress: Progress = lambda step, done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> FitReport:
    """Fit a map between two models by name, from nothing if need be.

    Args:
        note: Told what of the text is unknown to the tokenizer, and where the moments do not fit
            in memory and two passes are made instead.
    """
    shapes = geometries(names, loading)
    asked, options = options, with_scope(options, shapes, request.recipe)
    require_room(names, text_options, options, None, loading)
    found = read_text(names, text_options, loading, note)
    reused: tuple[str, ...] = ()
    path = cached_path(names, found, options, loading)
    if path is None or open_finished(path) is None:
        said = plan.two_passes(*shapes, options, request.recipe.k)
        if said is not None:
            if request.layers is None:
                note(said)
            request, options, reused = _choose_first(
                names, found, asked, request, loading, progress
            )
    calibration, known = collect_pair(names, found, options, None, loading, progress)
    openers = tuple(partial(loading.open, name) for name in names)
    reused = (*reused, "collect") if known else reused
    return fit_calibration(calibration, request, progress, reused, openers)


def _choose_first(
    names: tuple[str, str],
    found: Text,
    options: CollectOptions,
    request: FitRequest,
    loading: Loading,
    progress: Progress,
) -> tuple[FitRequest, CollectOptions, tuple[str, ...]]:
    """Choose layers on a sample of the text, where moments of all do not fit in memory.

    Returns:
        The request with its choice, what to collect for it, and what was there already.

    Raises:
        UsageError: The sample's moments do not fit either, or layers are to be chosen greedily.
    """
    shapes = geometries(names, loading)
    if request.layers is not None:
        layers = load_layers(request.layers)[1]
        return request, of_layers(options, shapes, request.recipe, layers), ()
    refuse_greedy(request)
    sample = Text(found.token_ids[: plan.SAMPLE], found.record)
    calibration, known = collect_pair(
        names, sample, plan.sample_of(options), None, loading, progress
    )
    for k in counts_to_try(request.recipe, shapes, tuple(found.token_ids.shape), options):
        recipe = replace(request.recipe, k=k)
        choice, path, chosen = cached_layers(calibration, recipe, request.selection, None)
        narrow = of_layers(options, shapes, request.recipe, choice.layers)
        if plan.too_large(*shapes, narrow) is None:
            break
    reused = (*(("sample",) if known else ()), *(("select-layers",) if chosen else ()))
    return replace(request, layers=path), narrow, reused


def refuse_greedy(request: FitRequest) -> None:
    """Refuse what two passes cannot do.

    Raises:
        UsageError: Layers are to be chosen greedily.
    """
    if request.selection == "greedy":
        raise UsageError(
            "--method greedy tries layers together, whose moments do not fit in memory here; "
            "take --method top"
        )


def counts_to_try(
    recipe: Recipe,
    shapes: tuple[Geometry, Geometry],
    grid: tuple[int, int],
    options: CollectOptions,
    most: int | None = plan.USUAL_K,
) -> list[int]:
    """Return the k to try, largest first: the recipe's, or those with rows enough for inputs.

    Args:
        grid: N sequences of T tokens.
        most: k at most; None takes what the source has.
    """
    if recipe.k != "auto":
        return [min(int(recipe.k), shapes[0].layers)]
    rows = grid[0] * -(-grid[1] // options.stride) * (1 - options.held_out)
    return auto_counts(recipe.options, shapes, rows, most)[::-1]


def of_layers(
    options: CollectOptions,
    shapes: tuple[Geometry, Geometry],
    recipe: Recipe,
    layers: tuple[tuple[int, ...], ...],
) -> CollectOptions:
    """Return what to collect for a recipe and a choice of layers."""
    return with_scope(replace(options, layers=layers), shapes, recipe)
