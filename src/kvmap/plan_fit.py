"""What a fit will go through: one pass over the text or two, then its stages.

Sizes follow from shapes, from how much text there is and from the recipe; which layers will be
chosen is not known beforehand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kvmap import fit, models, plan
from kvmap.calibration import Calibration
from kvmap.chosen import near_layers
from kvmap.collect_options import CollectOptions, check_options
from kvmap.collect_pair import Loading, TextOptions, check_layers, with_scope
from kvmap.errors import UsageError
from kvmap.fit.recipes import require_mapped
from kvmap.fit_pair import FitRequest, counts_to_try, of_layers, refuse_greedy
from kvmap.fit_stages import FitSize, ModelSize, stages
from kvmap.footprint import apart_bytes
from kvmap.geometry import Geometry
from kvmap.layers import load_layers
from kvmap.models.configs import load_config, parameter_count, tape_width
from kvmap.models.devices import pick_device, pick_dtype


def map_sizes(
    shapes: tuple[Geometry, Geometry], itemsize: int, moments: int | None = None
) -> list[dict[str, Any]]:
    """Return the size of each recipe's map; a k that the source's layers cap is listed once.

    Args:
        moments: Bytes of the moments that are there already.
    """
    rows = plan.map_table(*shapes, itemsize, moments)
    return [row for index, row in enumerate(rows) if row not in rows[:index]]


Shapes = tuple[Geometry, Geometry]
Sizes = tuple[ModelSize, ModelSize]


def collect_plan(
    shapes: Shapes, sizes: Sizes, text: TextOptions, options: CollectOptions
) -> dict[str, Any]:
    """Return what a collection reads, keeps and takes."""
    grid, itemsize = (text.sequences, text.length), sizes[0].itemsize
    pair = tuple((shape, size.parameters) for shape, size in zip(shapes, sizes, strict=True))
    cost = plan.collect_cost(pair, grid, options, itemsize)
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
        "peak_bytes": cost.memory_bytes,
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
    """Return what collecting from two models takes, in two passes if need be, and then fitting.

    Args:
        request: Of a fit. Without one, two passes are those of the default recipe.

    Raises:
        UsageError: Two passes cannot do what is asked, or a collection or a fit would refuse it.
    """
    wanted = request or FitRequest(fit.recipe(fit.DEFAULT_RECIPE))
    kept = with_scope(options, shapes, request and request.recipe)
    check_options(kept, text.sequences, text.length)
    check_layers(shapes, kept.layers)
    require_mapped(wanted.recipe.options, shapes[1])
    said = plan.two_passes(*shapes, with_scope(options, shapes, wanted.recipe), wanted.recipe.k)
    passes = {}
    if said and wanted.layers:
        kept = of_layers(options, shapes, wanted.recipe, load_layers(wanted.layers)[1])
    elif said:
        refuse_greedy(wanted)
        passes = {"two_passes": said, **_passes(shapes, sizes, text, options, wanted.recipe)}
    found = {"collect": collect_plan(shapes, sizes, text, kept), **passes}
    if request is None:
        return found
    grid, second = (text.sequences, text.length), passes.get("second_pass", {})
    k = second.get("k") or _most_layers(request, shapes, grid, options)
    moments = second.get("apart_moments_bytes") or found["collect"]["moments_bytes"]
    size = FitSize(request.recipe, k, shapes, sizes, grid, options, moments, sizes[0].itemsize)
    return {**found, "fit": _fit_plan(size)}


def _passes(
    shapes: Shapes, sizes: Sizes, text: TextOptions, options: CollectOptions, recipe: fit.Recipe
) -> dict[str, Any]:
    """Return what each of two passes takes.

    The second is planned for layers of about the same relative depth, whose neighbours share
    most, and, with names that begin with "apart", for any that lie apart.
    """
    sample = replace(text, sequences=min(plan.SAMPLE, text.sequences))
    first = collect_plan(shapes, sizes, sample, plan.sample_of(options))
    depths = [shape.layers for shape in shapes]
    for k in counts_to_try(recipe, shapes, (text.sequences, text.length), options):
        near = tuple(near_layers(at, depths[1], depths[0], k) for at in range(depths[1]))
        narrow = of_layers(options, shapes, recipe, near)
        if plan.too_large(*shapes, narrow) is None:
            break
    second = collect_plan(shapes, sizes, text, narrow)
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
    index, recorded = calibration.index, calibration.index["options"]
    shapes = (calibration.source.geometry, calibration.target.geometry)
    scope = calibration.scope
    moments = plan.moments_bytes(*shapes, scope)
    kept = {name: recorded[name] for name in ("stride", "held_out", "shard") if name in recorded}
    options, grid = CollectOptions(**vars(scope), **kept), (index["sequences"], index["length"])
    require_mapped(request.recipe.options, shapes[1])
    k = _most_layers(request, shapes, grid, options)
    names = (calibration.source.name, calibration.target.name)
    sizes = tuple(_size_by_name(name, loading) for name in names)
    itemsize = getattr(torch, calibration.source.dtype).itemsize
    recipe = fit.with_lookback(request.recipe, scope.lookback_layers)
    size = FitSize(recipe, k, shapes, sizes, grid, options, moments, itemsize)
    return {"maps": map_sizes(shapes, 4, moments), "fit": _fit_plan(size)}


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


def _fit_plan(size: FitSize) -> dict[str, Any]:
    return {"k": size.k, "k_is_known": size.recipe.k != "auto", "stages": stages(size)}
