"""What a fit will go through: one pass over the text or two, then its stages.

Sizes follow from shapes, from how much text there is and from the recipe; which layers will be
chosen is not known beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvmap import fit, models, plan
from kvmap.calibration import Calibration
from kvmap.calibration_files import Scope
from kvmap.chosen import near_layers
from kvmap.collect_options import CollectOptions, check_options
from kvmap.collect_pair import TOKEN_BYTES, Loading, TextOptions, check_layers, with_scope
from kvmap.errors import UsageError
from kvmap.fit.recipes import RECIPES, require_mapped
from kvmap.fit_pair import FitRequest, counts_to_try, of_layers, refuse_greedy
from kvmap.fit_stages import FitSize, ModelSize, most_bytes, stages
from kvmap.footprint import apart_bytes, map_parameters, use_bytes
from kvmap.geometry import Geometry
from kvmap.layers import load_layers
from kvmap.map_options import MapOptions
from kvmap.models.configs import load_config, parameter_count, tape_width
from kvmap.models.devices import pick_device, pick_dtype
from kvmap.moments import NOT_TOGETHER
from kvmap.pipeline import cache_folder

Shapes = tuple[Geometry, Geometry]
Sizes = tuple[ModelSize, ModelSize]
# k of the rows of a recipe whose own is free.
COUNTS = (1, 4, 8)


def map_sizes(size: FitSize, itemsize: int, collected: bool, rate: float) -> list[dict[str, Any]]:
    """Return each recipe's map, for several k: its size, its FLOPs, and the memory that it takes.

    `work_share` is its FLOPs a token over those of the target's own weights; None where the
    target's config is not at hand.

    Args:
        size: A fit of the pair, whose recipe and k are others.
        itemsize: Bytes of a number of a map.
        collected: The moments are there already; else each recipe has those it would collect.
    """
    source, reader, rows = size.shapes[0], size.models[1], []
    for name, preset in RECIPES.items():
        recipe = fit.with_lookback(preset, size.options.lookback_layers)
        counts = COUNTS if recipe.k == "auto" else (int(recipe.k),)
        for k in sorted({min(k, source.layers) for k in counts}):
            moments = size.moments if collected else _moments_of(recipe, k, size)
            planned = stages(replace(size, recipe=recipe, k=k, moments=moments), rate)
            parameters = map_parameters(recipe, k, *size.shapes)
            rows.append(
                {
                    "recipe": name,
                    "k": k,
                    "bytes": parameters * itemsize,
                    "flops_per_token": 2 * parameters,
                    "work_share": reader and parameters / reader.parameters,
                    "fit_bytes": most_bytes(planned),
                    "use_bytes": use_bytes(recipe, k, *size.shapes),
                }
            )
    return rows


def _moments_of(recipe: fit.Recipe, k: int, size: FitSize) -> int:
    """Return the bytes of moments of one pass, or of a second one's layers, that lie apart."""
    kept = with_scope(size.options, size.shapes, recipe)
    if plan.two_passes(*size.shapes, kept, k) is None:
        return plan.moments_bytes(*size.shapes, kept.scope)
    return apart_bytes(*size.shapes, _near(recipe, k, size.shapes, size.options))


def _near(recipe: fit.Recipe, k: int, shapes: Shapes, options: CollectOptions) -> CollectOptions:
    """Return what to collect for k source layers of about each target layer's relative depth."""
    depths = [shape.layers for shape in shapes]
    near = tuple(near_layers(at, depths[1], depths[0], k) for at in range(depths[1]))
    return of_layers(options, shapes, recipe, near)


def collect_plan(
    shapes: Shapes, sizes: Sizes, text: TextOptions, options: CollectOptions, rate: float
) -> dict[str, Any]:
    """Return what a collection reads, keeps and takes, at a rate of FLOP/s."""
    grid, itemsize = (text.sequences, text.length), sizes[0].itemsize
    pair = tuple((shape, size.parameters) for shape, size in zip(shapes, sizes, strict=True))
    cost = plan.collect_cost(pair, grid, options, itemsize, rate)
    moments = plan.moments_bytes(*shapes, options.scope) if options.moments else 0
    return {
        "sequences": text.sequences,
        "length": text.length,
        "stride": options.stride,
        "heads": options.heads,
        "joint": options.joint,
        "dump_bytes": cost.disk_bytes - moments,
        "moments_bytes": moments,
        "too_large": plan.too_large(*shapes, options),
        "disk_bytes": cost.disk_bytes,
        # The text's tokens are there before the models are.
        "peak_bytes": max(cost.memory_bytes, TOKEN_BYTES * text.sequences * text.length),
        "flops": cost.flops,
        "seconds": cost.seconds,
    }


def plan_models(
    shapes: Shapes,
    sizes: Sizes,
    text: TextOptions,
    options: CollectOptions,
    request: FitRequest | None = None,
) -> dict[str, Any]:
    """Return what collecting from two models takes; of a fit, also each recipe's map and stages.

    A fit collects in two passes if need be. `here` says whether all of it fits this machine.

    Args:
        request: Of a fit; without one collecting alone is planned.

    Raises:
        UsageError: Two passes cannot do what is asked, or a collection or a fit would refuse it.
    """
    rate = plan.matmul_rate()
    kept = with_scope(options, shapes, request and request.recipe)
    check_options(kept, text.sequences, text.length)
    check_layers(shapes, kept.layers)
    if request is None:
        return {"collect": collect_plan(shapes, sizes, text, kept, rate)}
    require_mapped(request.recipe.options, shapes[1])
    said = plan.two_passes(*shapes, kept, request.recipe.k)
    passes = {}
    if said and request.layers:
        kept = of_layers(options, shapes, request.recipe, load_layers(request.layers)[1])
    elif said:
        refuse_greedy(request)
        passes = _passes(shapes, sizes, text, options, request.recipe, rate)
    found = {"collect": collect_plan(shapes, sizes, text, kept, rate)}
    collecting = list(passes.values()) or [found["collect"]]
    found |= {"two_passes": said, **passes} if passes else {}
    grid, last = (text.sequences, text.length), collecting[-1]
    k = last.get("k") or _most_layers(request, shapes, grid, options)
    moments = last.get("apart_moments_bytes") or last["moments_bytes"]
    size = FitSize(request.recipe, k, shapes, sizes, grid, options, moments, sizes[0].itemsize)
    fitting = _fit_plan(size, rate)
    near = most_bytes(stages(replace(size, moments=last["moments_bytes"]), rate))
    return {
        "maps": map_sizes(size, sizes[0].itemsize, collected=False, rate=rate),
        **found,
        "fit": fitting,
        "here": here(collecting, fitting["stages"], near),
    }


def here(
    collecting: list[dict[str, Any]],
    fitting: Sequence[dict[str, Any]] = (),
    least: int = 0,
    where: Path | None = None,
) -> dict[str, Any]:
    """Return whether this machine has the memory and disk for work from nothing, and the time.

    `fits` is None where that hangs on which layers are chosen.

    Args:
        collecting: Passes, as `collect_plan` has them.
        fitting: Stages of the fit, if there is one.
        least: Bytes that the fit holds at least.
        where: Folder to fill; None for the cache folder.
    """
    disk = sum(step["disk_bytes"] for step in collecting)
    passes = [(step["peak_bytes"], step.get("apart_peak_bytes", 0)) for step in collecting]
    collected = max(low for low, _ in passes), max(map(max, passes))
    fitted = least, most_bytes(fitting) if fitting else 0
    memory, room = plan.free_memory("cpu"), plan.free_disk(where or cache_folder())
    needs = [
        ("collecting", "memory", collected, memory),
        ("fitting", "memory", fitted, memory),
        ("collecting", "disk", (disk, disk), room),
    ]
    short = [need for need in needs if need[2][0] > need[3]]
    maybe = [need for need in needs if need[2][1] > need[3]]
    lacking = [
        {"work": work, "of": what, "bytes": low if short else high, "free_bytes": free}
        for work, what, (low, high), free in short or maybe
    ]
    return {
        "fits": False if short else None if maybe else True,
        "lacking": lacking,
        "peak_bytes": max(collected[1], fitted[1]),
        "free_memory_bytes": memory,
        "disk_bytes": disk,
        "free_disk_bytes": room,
        "seconds": sum(step["seconds"] for step in (*collecting, *fitting)),
    }


def _passes(
    shapes: Shapes,
    sizes: Sizes,
    text: TextOptions,
    options: CollectOptions,
    recipe: fit.Recipe,
    rate: float,
) -> dict[str, dict[str, Any]]:
    """Return what each of two passes takes.

    The second is planned for layers of about the same relative depth, whose neighbours share
    most, and, with names that begin with "apart", for any that lie apart.
    """
    sample = replace(text, sequences=min(plan.SAMPLE, text.sequences))
    first = collect_plan(shapes, sizes, sample, plan.sample_of(options), rate)
    for k in counts_to_try(recipe, shapes, (text.sequences, text.length), options):
        narrow = _near(recipe, k, shapes, options)
        if plan.too_large(*shapes, narrow) is None:
            break
    second = collect_plan(shapes, sizes, text, narrow, rate)
    apart = apart_bytes(*shapes, narrow)
    second |= {
        "k": k,
        "apart_moments_bytes": apart,
        "apart_peak_bytes": second["peak_bytes"] + apart - second["moments_bytes"],
    }
    return {"first_pass": first, "second_pass": second}


def calibration_plan(
    calibration: Calibration, request: FitRequest, loading: Loading
) -> dict[str, Any]:
    """Return the size of each recipe's map of a calibration, and what the stages of a fit take."""
    size, rate = size_of(calibration, request, loading), plan.matmul_rate()
    maps = map_sizes(size, 4, collected=True, rate=rate)
    return {"maps": maps, "fit": _fit_plan(size, rate)}


def size_of(calibration: Calibration, request: FitRequest, loading: Loading) -> FitSize:
    """Return a fit of a calibration to plan."""
    index, recorded = calibration.index, calibration.index["options"]
    shapes = (calibration.source.geometry, calibration.target.geometry)
    scope = calibration.scope
    moments = plan.moments_bytes(*shapes, scope)
    kept = {name: recorded[name] for name in ("stride", "held_out", "shard") if name in recorded}
    options, grid = CollectOptions(**vars(scope), **kept), (index["sequences"], index["length"])
    require_mapped(request.recipe.options, shapes[1])
    require_recorded(request.recipe.options, scope)
    k = _most_layers(request, shapes, grid, options)
    names = (calibration.source.name, calibration.target.name)
    sizes = tuple(_size_by_name(name, loading) for name in names)
    itemsize = getattr(torch, calibration.source.dtype).itemsize
    recipe = fit.with_lookback(request.recipe, scope.lookback_layers)
    return FitSize(recipe, k, shapes, sizes, grid, options, moments, itemsize)


def require_recorded(options: MapOptions, scope: Scope) -> None:
    """Check that a calibration's moments are of what a map reads.

    Raises:
        UsageError: They are of matched heads alone, or of keys and values apart.
    """
    apart = options.heads == "all" and scope.heads != "all"
    if apart or (options.mixed and not scope.joint):
        raise UsageError(NOT_TOGETHER)


def _most_layers(
    request: FitRequest, shapes: Shapes, grid: tuple[int, int], options: CollectOptions
) -> int:
    """Return the most source layers that a target layer may read: those chosen, or tried."""
    layers = load_layers(request.layers)[1] if request.layers else options.layers
    if layers is not None:
        return max(map(len, layers))
    return counts_to_try(request.recipe, shapes, grid, options, most=None)[0]


def model_size(config: Any, loading: Loading) -> ModelSize:
    """Return how large a config's model is, loaded so."""
    itemsize = pick_dtype(loading.dtype, pick_device(loading.device)).itemsize
    trust = loading.trust_remote_code
    return ModelSize(parameter_count(config, trust), tape_width(config, trust), itemsize)


def _size_by_name(name: str, loading: Loading) -> ModelSize | None:
    try:
        config = load_config(models.resolve(name), loading.trust_remote_code)
    except UsageError:
        return None
    return model_size(config, loading)


def _fit_plan(size: FitSize, rate: float) -> dict[str, Any]:
    return {"k": size.k, "k_is_known": size.recipe.k != "auto", "stages": stages(size, rate)}
