"""Run the stages that are missing and reuse those that are there.

A stage's artifact lies in the cache folder under the digest of everything it depends on, so
that changing the text, a revision or an option makes just what follows from it again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from kvmap import atomic, fit, models
from kvmap.calibration import Calibration
from kvmap.collect_options import CollectOptions
from kvmap.columns import LOOKBACK
from kvmap.errors import UsageError
from kvmap.fit import FitScores, Recipe, accuracy
from kvmap.fit.assignment import best_assignment
from kvmap.fit.choice import Choice, probe_ridges, select_layers
from kvmap.fit.coordinates import Coordinates
from kvmap.fit.frontier import Point, Told, frontier
from kvmap.fit.job import Opener, splits
from kvmap.fit.low_rank import reduce_rank
from kvmap.fit.polish import PolishOptions, polish
from kvmap.fit.recipes import require_mapped
from kvmap.geometry import json_digest
from kvmap.layers import are_layers_of, load_layers, save_layers, tried_scores
from kvmap.mapping import CacheMap

T = TypeVar("T")
Progress = Callable[[str, int, int], None]


def cache_folder() -> Path:
    """Return the folder of reusable artifacts: KVMAP_CACHE, else the user's cache folder."""
    if named := os.environ.get("KVMAP_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        raise UsageError(
            "this user has no home folder; set KVMAP_CACHE to a folder to keep things in"
        )
    return Path(base) / "kvmap"


@dataclass(frozen=True)
class Text:
    """Calibration text: the tokens [N, T] and where they came from."""

    token_ids: Tensor
    record: dict[str, Any]


def calibration_path(
    digests: tuple[str, str], dtypes: tuple[str, str], text: Text, options: CollectOptions
) -> Path:
    """Return where the calibration of these models, text and options is cached."""
    tokens = json_digest(text.token_ids.tolist())
    key = json_digest([digests, dtypes, tokens, asdict(options), LOOKBACK])
    return cache_folder() / "calibrations" / key[:24]


def sound_or_none(load: Callable[[Path], T], path: Path) -> T | None:
    """Load what was made before; None where it is not there, or damaged and to be made again."""
    try:
        return load(path) if path.exists() else None
    except UsageError:
        return None


def open_finished(path: Path) -> Calibration | None:
    """Return the calibration in a folder, None where no sound one was finished there."""
    return sound_or_none(Calibration.open, path)


def cached_layers(
    calibration: Calibration, recipe: Recipe, method: str, path: Path | None
) -> tuple[Choice, Path, bool]:
    """Return the choice of layers, its file, and whether it was there already.

    Args:
        path: Where to write it, whatever is there; None takes the cache folder, and what it has.
    """
    recipe = _completed(recipe, calibration)
    wanted = {
        "k": recipe.k,
        "method": method,
        "ridges": probe_ridges(recipe),
        "options": asdict(recipe.options),
    }
    key = json_digest([calibration.digest, wanted])
    if path is None:
        path = cache_folder() / "layers" / f"{key[:24]}.safetensors"
        if known := sound_or_none(partial(_known_choice, calibration, key), path):
            return known, path, True
    choice = select_layers(splits(calibration, recipe.options.native_head), recipe, method)
    atomic.make_folder(path.parent)
    tried = {str(k): None if v != v else v for k, v in choice.tried.items()}
    record = {
        "key": key,
        "k": choice.k,
        "method": method,
        "tried": tried,
        "calibration": calibration.digest,
    }
    save_layers(path, choice.scores, choice.layers, record)
    return choice, path, False


def _known_choice(calibration: Calibration, key: str, path: Path) -> Choice | None:
    """Return the choice that a file holds, None where it was made of something else.

    Raises:
        UsageError: It is not sound, or not of this pair's layers.
    """
    scores, layers, metadata = load_layers(path)
    if metadata.get("key") != key:
        return None
    _check_layers(calibration, layers)
    return Choice(scores, layers, metadata["k"], tried_scores(metadata))


def _completed(recipe: Recipe, calibration: Calibration) -> Recipe:
    """Fill in which source head each target head reads, and which layers of the tokens before."""
    kept = calibration.scope.lookback_layers
    recipe = fit.with_lookback(recipe, kept)
    options = recipe.options
    if options.lookback and not set(options.lookback_layers) <= set(kept):
        wanted, found = (",".join(map(str, one)) for one in (options.lookback_layers, kept))
        raise UsageError(
            f"{calibration.path}: keeps layers {found} of the tokens before, the map reads "
            f"{wanted}; collect with `--lookback-layers {wanted}`"
        )
    free = options.heads == "matched" and not options.assignment
    if free and recipe.assign == "best" and calibration.index["options"]["heads"] == "all":
        found = best_assignment(splits(calibration, options.native_head))
        return replace(recipe, options=replace(options, assignment=found))
    geometries = (calibration.source.geometry, calibration.target.geometry)
    return replace(recipe, options=fit.with_assignment(options, *geometries))


@dataclass(frozen=True)
class Fitted:
    """A map and how its fit went; `seconds` is the time from moments to map."""

    cmap: CacheMap
    scores: FitScores
    seconds: float


def fit_map(
    calibration: Calibration,
    layers: tuple[tuple[int, ...], ...],
    recipe: Recipe,
    progress: Progress,
    openers: tuple[Opener, Opener] | None = None,
) -> Fitted:
    """Fit a map from a calibration and a choice of layers.

    Args:
        openers: Load the source and the target where the recipe runs them; by the names in
            the calibration if not given.

    Raises:
        UsageError: The choice is not of this pair's layers.
    """
    recipe = _completed(recipe, calibration)
    _check_layers(calibration, layers)
    require_mapped(recipe.options, calibration.target.geometry)
    named = (calibration.source.name, calibration.target.name)
    openers = openers or tuple(partial(models.load, name) for name in named)
    job = fit.Job(calibration, layers, recipe, openers, progress)
    started = time.perf_counter()
    fitted, scores = fit.METHODS[recipe.method](job)
    cmap = CacheMap(
        calibration.source,
        calibration.target,
        fitted,
        recipe.options,
        provenance(calibration, scores, recipe),
        accuracy.tables(scores),
    )
    linear = recipe.method == "closed-form"
    if recipe.rank and linear:
        cmap = reduce_rank(cmap, job.splits, recipe.rank)
    if recipe.polish:
        cmap = polished(job, cmap)
    if (recipe.rank and linear) or recipe.polish:
        cmap = accuracy.measured(job, cmap)
    return Fitted(cmap, scores, time.perf_counter() - started)


def measure_accuracy(cmap: CacheMap, calibration: Calibration) -> CacheMap:
    """Return a linear map with its R² on the rows of a calibration, train and held out.

    Raises:
        UsageError: The calibration is of another pair, or keeps too little.
    """
    for side in ("source", "target"):
        said = f"{calibration.path}: the map's {side}"
        remedy = "give a calibration of the same pair"
        getattr(cmap, side).require_same(getattr(calibration, side), said, remedy)
    made = replace(fit.recipe("kvmap"), options=cmap.options)
    job = fit.Job(calibration, (), made, (), lambda *_: None)
    return accuracy.measured(job, cmap)


def polished(job: fit.Job, cmap: CacheMap) -> CacheMap:
    """Polish a map on the calibration's own sequences; an interrupted polish is taken up."""
    key = json_digest([job.calibration.digest, job.layers, fit.describe(job.recipe)])
    checkpoint = cache_folder() / "polish" / f"{key[:24]}.safetensors"
    atomic.make_folder(checkpoint.parent)
    sequences = tuple(job.calibration.token_ids(split) for split in ("train", "held_out"))
    models = (job.open(0), job.open(1))
    cmap = cmap.to(models[1].device)
    coordinates = Coordinates.of(cmap, job.splits)
    job.calibration.drop_moments()  # gigabytes, and no more than coordinates are made of them
    options = PolishOptions(steps=job.recipe.polish)
    return polish(cmap, models, sequences, coordinates, options, checkpoint, job.progress).cmap


def cost_quality(
    calibration: Calibration,
    recipe: Recipe,
    progress: Progress,
    openers: tuple[Opener, Opener] | None = None,
    told: Told = lambda points, done, total: None,
) -> list[Point]:
    """Measure maps of several costs with a recipe's exact parts; see `kvmap.fit.frontier`."""
    named = (calibration.source.name, calibration.target.name)
    openers = openers or tuple(partial(models.load, name) for name in named)
    return frontier(fit.Job(calibration, (), recipe, openers, progress), told)


def _check_layers(calibration: Calibration, layers: tuple[tuple[int, ...], ...]) -> None:
    source, target = calibration.source.geometry, calibration.target.geometry
    if not are_layers_of(layers, source, target):
        raise UsageError(
            f"the choice of layers is for another pair: found {len(layers)} target layers, "
            f"expected {target.layers} with source layers below {source.layers}; "
            "run `kvmap select-layers` on this calibration"
        )


def provenance(calibration: Calibration, scores: FitScores, recipe: Recipe) -> dict[str, Any]:
    """Return what a map's header says about its making."""
    ridges = {
        kind: [[None if r != r else r for r in row] for row in table.tolist()]
        for kind, table in scores.ridge.items()
    }
    return {
        "calibration": calibration.digest,
        "tokens_digest": calibration.index["tokens_digest"],
        "text": calibration.index["text"],
        "collect": calibration.index["options"],
        "recipe": fit.describe(recipe),
        "ridge": ridges,
        "ridge_convention": "relative to the mean diagonal of the centred input covariance",
        "r2": {
            split: {kind: scores.mean(split, kind) for kind in ("key", "value")}
            for split in ("train", "held_out")
        },
        "rows_per_input": scores.rows_per_input,
    }
