"""Memory that collecting, fitting and mapping take, from the shapes of two models alone.

Counted is what is held at the same time where most is: models, moments, and the largest of what
passes. Files that are read through the page cache count as held, since their pages are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from kvmap.chosen import chosen_groups, groups_apart
from kvmap.collect_options import CollectOptions
from kvmap.columns import KINDS, LOOKBACK, Group, groups, head_sizes
from kvmap.engine.workspace import EXTRA_BYTES, LEAST_TOKENS, MOST_TOKENS
from kvmap.fit.recipes import Recipe
from kvmap.geometry import Geometry
from kvmap.map_options import MapOptions, weight_shape
from kvmap.moments import ROW_CHUNK, update_bytes


def kept_groups(source: Geometry, target: Geometry, options: CollectOptions) -> tuple[Group, ...]:
    """Return the groups whose moments a collection keeps."""
    if not options.moments:
        return ()
    found = _all_groups(source, target, options)
    if options.layers is None:
        return found
    return chosen_groups(found, options.layers, head_sizes(source, target))


def _all_groups(source: Geometry, target: Geometry, options: CollectOptions) -> tuple[Group, ...]:
    return groups(source, target, options.heads, options.joint, options.late_layers(source))


@lru_cache(maxsize=256)  # a plan asks again and again, and runs of chosen layers take long to find
def group_shapes(
    source: Geometry, target: Geometry, options: CollectOptions
) -> tuple[tuple[int, int], ...]:
    """Return inputs p and outputs q of each group kept."""
    return _widths(kept_groups(source, target, options), source, target)


def apart_bytes(source: Geometry, target: Geometry, options: CollectOptions) -> int:
    """Return the most that moments take of any choice of as many layers as the options'.

    A group for each target layer, or one of all where that holds fewer numbers.
    """
    return sum(
        min(
            accumulator_bytes(_widths(found, source, target))
            for found in ((group,), groups_apart((group,), options.layers))
        )
        for group in _all_groups(source, target, options)
    )


def _widths(
    found: tuple[Group, ...], source: Geometry, target: Geometry
) -> tuple[tuple[int, int], ...]:
    sizes = head_sizes(source, target)
    return tuple(
        tuple(sum(sizes[b.side] for b in blocks) for blocks in (group.inputs, group.outputs))
        for group in found
    )


def accumulator_bytes(shapes: Sequence[tuple[int, int]]) -> int:
    """Return the bytes of train and held-out moments of groups of these shapes."""
    return 2 * 8 * sum(p * p + p * q + p + 2 * q + 1 for p, q in shapes)


def row_bytes(source: Geometry, target: Geometry, itemsize: int, late: int) -> tuple[int, int]:
    """Return the bytes of one kept token's row of the source and of the target.

    Args:
        late: Layers kept of each of the tokens before.
    """
    back = 2 * LOOKBACK * late * source.width * itemsize
    return source.kv_bytes_per_token(itemsize) + back, target.kv_bytes_per_token(itemsize)


def collect_bytes(
    models: tuple[tuple[Geometry, int], tuple[Geometry, int]],
    shape: tuple[int, int],
    options: CollectOptions,
    itemsize: int,
    together: bool = True,
) -> int:
    """Return the most that `collect` holds, models included.

    Args:
        models: Geometry and number of parameters of source and target.
        shape: N sequences of T tokens.
        together: Whether both models are in memory at a time.
    """
    shapes = (models[0][0], models[1][0])
    sizes = [parameters * itemsize for _, parameters in models]
    weights = sum(sizes) if together else max(sizes)
    rows = min(shape[0], options.shard) * -(-shape[1] // options.stride)
    each = row_bytes(*shapes, itemsize, len(options.late_layers(shapes[0])))
    tokens = min(options.batch, shape[0]) * shape[1]
    reading = max(
        rows * row
        + in_pieces(
            tokens * (side.kv_bytes_per_token(itemsize) + passing_bytes(*model, itemsize)),
            tokens * side.width * itemsize,
        )
        for row, side, model in zip(each, shapes, models, strict=True)
    )
    held = group_shapes(*shapes, options)
    moments = accumulator_bytes(held)
    passing = update_bytes(held, rows, itemsize, getattr(torch, options.products))
    adding = (rows + min(rows, ROW_CHUNK)) * sum(each) + passing
    return weights + moments + max(reading, adding if held else 0)


def in_pieces(passing: int, piece: int) -> int:
    """Return what is held for what passes in pieces of some bytes.

    Of small ones the C library (glibc) keeps about as much again once they are freed; from 32 MB
    on it gives them back at once.
    """
    return passing if piece >= 32 << 20 else 2 * passing


def passing_bytes(shape: Geometry, parameters: int, itemsize: int) -> int:
    """Return about what one token takes on its way through one layer of a model.

    Every weight of a layer is met by one number for each of the hidden size's channels, so a
    token's activations there are the layer's weights over the hidden size. A table of embeddings
    is no layer's; where the output has one of its own, that is counted in.
    """
    inner = max(parameters - shape.vocabulary * shape.hidden_size, 0)
    return inner * itemsize // (shape.layers * shape.hidden_size)


def usual_rank(recipe: Recipe, inputs: int, outputs: int) -> int | None:
    """Return about what rank a recipe's maps have; None for whole weights.

    One taken from held-out error is what it came to between embedded models: half the outputs,
    a quarter where a tenth may be added to the error.

    Args:
        outputs: Of keys and values together.
    """
    if not recipe.rank or not recipe.options.joint:
        return None
    rank = int(recipe.rank) or outputs // (4 if recipe.rank >= 0.1 else 2)
    return rank if rank * (inputs + outputs) < inputs * outputs else None


def map_parameters(recipe: Recipe, k: int, source: Geometry, target: Geometry) -> int:
    """Return about how many weights and biases a map with k source layers per target layer has."""
    options = recipe.options
    heads, p, q = weight_shape(options, min(k, source.layers), source, target)
    mapped, outputs = target.layers - options.exact_layers, len(KINDS) * q
    rank = usual_rank(recipe, p, outputs)
    weights = p * outputs if rank is None else rank * (p + outputs)
    return mapped * heads * (weights + outputs)


def fit_bytes(options: MapOptions, k: int, source: Geometry, target: Geometry, moments: int) -> int:
    """Return the most that a closed-form fit holds where chosen layers lie apart.

    Those of one regression: its moments of both splits, the scaled system, its factor and a copy
    that factoring makes, and the weights of the ridges compared.

    Args:
        moments: Bytes of the calibration's.
    """
    heads, p, q = weight_shape(options, min(k, source.layers), source, target)
    mapped = target.layers - options.exact_layers
    outputs = 2 * q if options.joint else q
    return moments + 8 * (5 * p * p + 11 * p * outputs) + 4 * mapped * 2 * heads * (p + 1) * q


def use_bytes(recipe: Recipe, k: int, source: Geometry, target: Geometry) -> int:
    """Return what mapping on a CPU holds beside both caches: weights as filed, and a workspace."""
    options = recipe.options
    heads, p, q = weight_shape(options, min(k, source.layers), source, target)
    read = source.layers + options.late_layers(source)
    columns = 2 * read * source.width + 2 * options.anchor * target.width
    gathered = p if k < source.layers else 0
    passing = 4 * 4 * max(source.width, target.width)
    if options.heads == "matched":  # every target head has columns of its own
        columns = columns // source.kv_heads * target.kv_heads
    rank = usual_rank(recipe, p, len(KINDS) * q) or 0
    each = 4 * (columns + heads * (gathered + q + rank)) + passing
    chunk = max(LEAST_TOKENS, min(EXTRA_BYTES["cpu"] // each, MOST_TOKENS["cpu"]))
    return 4 * map_parameters(recipe, k, source, target) + chunk * each
