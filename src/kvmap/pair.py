"""From the names of two models to a calibration or a map; what is there already is reused."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvmap import atomic, demo, fit, models, plan, text
from kvmap.calibration import Calibration
from kvmap.collect import CollectOptions, collect
from kvmap.errors import UsageError
from kvmap.fit import Recipe
from kvmap.fit.job import Opener
from kvmap.geometry import Geometry, json_digest
from kvmap.layers import load_layers
from kvmap.mapping import CacheMap
from kvmap.models import LoadedModel
from kvmap.models.configs import load_config, parameter_count, shape_of
from kvmap.models.devices import SHARDED, pick_device, pick_dtype
from kvmap.models.load import identify, load_tokenizer
from kvmap.pipeline import (
    Text,
    auto_counts,
    cache_folder,
    cached_layers,
    calibration_path,
    fit_map,
    open_finished,
    sound_or_none,
)
from kvmap.ranks import ranks

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Loading:
    """How models are loaded."""

    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False

    def open(self, name: str) -> LoadedModel:
        """Load a model by name."""
        return models.load(name, self.device, self.dtype, self.trust_remote_code)

    @property
    def dtype_name(self) -> str:
        """Return the name of the dtype that "auto" stands for here."""
        return str(pick_dtype(self.dtype, pick_device(self.device))).removeprefix("torch.")


@dataclass(frozen=True)
class TextOptions:
    """Which text both models read; `dataset` None takes the demo's for the embedded models."""

    dataset: str | None = None
    split: str = "train"
    sequences: int = 500
    length: int = 1024
    seed: int = 0


def read_text(names: tuple[str, str], options: TextOptions, loading: Loading) -> Text:
    """Read and tokenise calibration text with the source's tokenizer.

    Raises:
        UsageError: The data set or tokenizer cannot be read, there is too little text, or a
            model reads no sequences of this length.
    """
    dataset = options.dataset or default_dataset(names)
    for name, shape in zip(names, geometries(names, loading), strict=True):
        if shape.max_positions and options.length > shape.max_positions:
            raise UsageError(
                f"found --length {options.length}, but {name} reads at most {shape.max_positions} "
                "tokens; give a smaller one"
            )
    tokenizer = load_tokenizer(models.resolve(names[0]), loading.trust_remote_code)
    found = text.documents(dataset, options.split, tokenizer, options.length, options.seed)
    token_ids = text.token_sequences(found, tokenizer, options.length, options.sequences)
    label = Path(dataset).name if os.path.exists(dataset) else dataset
    return Text(token_ids, {"dataset": label, "split": options.split, "seed": options.seed})


def default_dataset(names: tuple[str, str]) -> str:
    """Return the data set that suits a pair: the demo's for embedded models, else web text."""
    return "demo" if all(name in demo.MODELS for name in names) else "fineweb-edu"


def geometries(names: tuple[str, str], loading: Loading) -> tuple[Geometry, Geometry]:
    """Return both cache shapes from configs alone, without RoPE tables."""
    return tuple(
        shape_of(load_config(models.resolve(name), loading.trust_remote_code)) for name in names
    )


def with_scope(
    options: CollectOptions, shapes: tuple[Geometry, Geometry], recipe: Recipe | None = None
) -> CollectOptions:
    """Fill in which moments are kept: what fits in memory, and what the recipe reads at least.

    Raises:
        UsageError: The layers of the tokens before are not the source's.
    """
    scope = plan.moments_scope(*shapes, options.layers)
    scope = scope if recipe is None else plan.scope_for(recipe, scope)
    late = options.lookback_layers or scope.lookback_layers
    if late[-1] >= shapes[0].layers:
        raise UsageError(
            f"found layer {late[-1]} of the tokens before, but the source has "
            f"{shapes[0].layers} layers; give --lookback-layers below that"
        )
    return replace(
        options,
        heads=scope.heads if options.heads == "auto" else options.heads,
        joint=scope.joint if options.joint is None else options.joint,
        lookback_layers=late,
    )


def collect_pair(
    names: tuple[str, str],
    found: Text,
    options: CollectOptions,
    out: Path | None,
    loading: Loading,
    progress: Progress,
    force: bool = False,
) -> tuple[Calibration, bool]:
    """Return a pair's calibration and whether it was there already.

    Args:
        out: Folder to fill; None takes the one in the cache folder, if it is there.
        force: Replace the calibration that is in `out`.
    """
    with ranks(loading.device == SHARDED) as team:
        path = out or _cached_path(names, found, options, loading)
        if out is None and path is not None and (finished := open_finished(path)):
            return finished, True
        _check_memory(geometries(names, loading), options)
        loaded: dict[str, LoadedModel] = {}
        together = plan.fits_together(_weight_bytes(names, loading), pick_device(loading.device))

        def opener(name: str) -> Callable[[], LoadedModel]:
            return lambda: loaded.get(name) or loading.open(name)

        if path is None:
            loaded = {name: loading.open(name) for name in names}
            digests = tuple(loaded[name].signature.digest for name in names)
            path = calibration_path(digests, (loading.dtype_name,) * 2, found, options)
        atomic.make_folder(path.parent)
        openers = tuple(opener(name) for name in names)
        with nullcontext() if out is not None or team.count > 1 else atomic.alone(path):
            if out is None and (finished := open_finished(path)):
                return finished, True
            made = collect(
                openers,
                found.token_ids,
                path,
                options,
                found.record,
                progress,
                together,
                force and out is not None,
                team,
            )
        return made, False


def _check_memory(shapes: tuple[Geometry, Geometry], options: CollectOptions) -> None:
    """Check that moments fit in memory and that chosen layers are the pair's, before any work.

    Raises:
        UsageError: Saying what to do instead.
    """
    source, target = shapes
    layers = options.layers
    if layers is not None and (
        len(layers) != target.layers or max(map(max, layers)) >= source.layers
    ):
        raise UsageError(
            f"found --layers of {len(layers)} target layers, expected {target.layers} that read "
            f"source layers below {source.layers}; choose them for this pair"
        )
    if problem := plan.too_large(*shapes, options):
        raise UsageError(problem)


def _weight_bytes(names: tuple[str, str], loading: Loading) -> tuple[int, int]:
    itemsize = pick_dtype(loading.dtype, pick_device(loading.device)).itemsize
    configs = [load_config(models.resolve(name), loading.trust_remote_code) for name in names]
    counts = (parameter_count(config, loading.trust_remote_code) for config in configs)
    return tuple(count * itemsize for count in counts)


def _cached_path(
    names: tuple[str, str], found: Text, options: CollectOptions, loading: Loading
) -> Path | None:
    digests = tuple(identify(name, loading.trust_remote_code) for name in names)
    if None in digests:
        return None
    return calibration_path(digests, (loading.dtype_name,) * 2, found, options)


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
        note: Told where the moments do not fit in memory and two passes are made instead.
    """
    found = read_text(names, text_options, loading)
    shapes = geometries(names, loading)
    asked, options = options, with_scope(options, shapes, request.recipe)
    reused: tuple[str, ...] = ()
    path = _cached_path(names, found, options, loading)
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
