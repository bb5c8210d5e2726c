"""Time a fit from moments, and what collecting them adds to the forward passes, at full shapes.

One target layer is fitted, where heads are matched for two of its heads, from random moments;
each model's forward pass is one layer. All are multiplied up to the whole, and the report says
what was measured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kvmap.bench.clock import Clock, timings
from kvmap.bench.layers import prefill_seconds
from kvmap.bench.pair import BenchOptions, random_tokens
from kvmap.bench.shapes import config_of, deepened, fast_dtype, random_model
from kvmap.calibration_files import Scope, empty_moments
from kvmap.chosen import near_layers
from kvmap.collect_options import CollectOptions
from kvmap.columns import KINDS, entry_sides, first_and_middle
from kvmap.errors import UsageError
from kvmap.fit import Recipe, Splits, with_assignment, with_lookback
from kvmap.fit.closed_form import RIDGE_GRID, layer_score
from kvmap.geometry import Geometry
from kvmap.moments import Moments, Rows
from kvmap.plan import USUAL_K, free_memory, moments_bytes

HEADS = 2
ROWS = 512


def bench_fit(
    names: tuple[str, str],
    recipe: Recipe,
    length: int,
    options: BenchOptions,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Measure the fit of a pair of known shapes and the accumulation of its moments.

    Args:
        length: Tokens of a calibration sequence.

    Raises:
        UsageError: The moments do not fit in memory.
    """
    clock = Clock(device, options.cpu_time)
    models = [random_model(name, device, fast_dtype(dtype, device), depth=1) for name in names]
    depths = [config_of(name).num_hidden_layers for name in names]
    whole = tuple(deepened(one, depth) for one, depth in zip(models, depths, strict=True))
    shapes, scale = _cut(whole, recipe.options.heads)
    recipe = with_lookback(recipe, first_and_middle(whole[0]))
    moments = _moments(shapes, recipe)
    rows = _drawn(shapes, recipe.options.lookback_layers, options.seed)
    accumulate = timings(
        lambda: {"update": clock.timed(lambda: moments.update(rows))[1]},
        options.budget,
        options.repeats,
    )["update"].median
    stride = CollectOptions().stride
    splits = Splits(_well_posed(moments), moments, *shapes)
    layer = clock.timed(lambda: _fit_layer(splits, recipe))[1]
    forward = sum(
        prefill_seconds(one, random_tokens((one,), length, options.seed), depth, clock)[0] / length
        for one, depth in zip(models, depths, strict=True)
    )
    mapped = depths[1] - recipe.options.exact_layers
    per_token = accumulate * scale / ROWS / stride
    return {
        "source": names[0],
        "target": names[1],
        "measured": f"1 of {mapped} layers, {shapes[1].kv_heads} of {whole[1].kv_heads} heads",
        "fit_seconds": layer * scale * mapped,
        "length": length,
        "stride": stride,
        "accumulate_seconds_per_token": per_token,
        "forward_seconds_per_token": forward,
        "accumulate_share": per_token / forward,
    }


def _cut(whole: tuple[Geometry, Geometry], heads: str) -> tuple[tuple[Geometry, Geometry], float]:
    """Return both shapes with a few heads where these are fitted apart, and the whole over them."""
    source, target = whole
    if heads == "all":
        return whole, 1.0
    kept = min(HEADS, target.kv_heads)
    read = -(-kept * source.kv_heads // target.kv_heads)
    cut = (replace(source, kv_heads=read), replace(target, kv_heads=kept))
    return cut, target.kv_heads / kept


def _moments(shapes: tuple[Geometry, Geometry], recipe: Recipe) -> Moments:
    """Return accumulators of what a recipe reads."""
    options = recipe.options
    scope = Scope(options.heads, options.mixed, lookback_layers=options.lookback_layers)
    needed = moments_bytes(*shapes, scope)
    if needed > free_memory("cpu") / 2:
        raise UsageError(
            f"the moments of {scope.heads} heads would take {needed / 1e9:.0f} GB here; "
            "time a recipe of matched heads, such as --recipe cachebridge"
        )
    return empty_moments(*shapes, scope)


def _drawn(shapes: tuple[Geometry, Geometry], late: tuple[int, ...], seed: int) -> Rows:
    """Draw entries [n, H, D] of every layer."""
    generator = torch.Generator().manual_seed(seed)
    return Rows(
        {
            (side, kind): {
                at: torch.randn(ROWS, shape.kv_heads, shape.head_size, generator=generator)
                for at in layers
            }
            for side, shape, layers in entry_sides(*shapes, late)
            for kind in KINDS
        }
    )


def _well_posed(moments: Moments) -> Moments:
    """Make up for the rows that were not drawn: as many inputs as there are, none redundant."""
    for name, tensor in moments.tensors.items():
        if name.endswith(".gram"):
            tensor.diagonal().add_(moments.count)
    return moments


def _fit_layer(splits: Splits, recipe: Recipe) -> float:
    """Fit the target's middle layer from as many source layers as the recipe reads."""
    index = splits.target.layers // 2
    k = min(splits.source.layers, USUAL_K if recipe.k == "auto" else int(recipe.k))
    chosen = near_layers(index, splits.target.layers, splits.source.layers, k)
    options = with_assignment(replace(recipe.options, assignment=()), splits.source, splits.target)
    ridges = RIDGE_GRID if recipe.ridge == "auto" else (float(recipe.ridge),)
    return layer_score(splits, index, chosen, options, ridges)
