"""What a fit takes, stage by stage: the closed form, row weights, networks, a polish.

Memory is what a stage holds at the same time where most is, files that are read included, as in
`kvmap.footprint`; work is FLOPs, at most, two for a product and a sum. Sizes are bytes; with
p inputs and q outputs of a regression, of which a layer has `groups`, and k source layers for
each target layer, that lie apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvmap.collect_options import CollectOptions, held_out_count
from kvmap.columns import KINDS
from kvmap.fit import Recipe
from kvmap.fit.closed_form import RIDGE_GRID
from kvmap.fit.continuation import KEPT_BYTES
from kvmap.fit.coordinates import MOST_INPUTS
from kvmap.fit.network import BATCH as ROWS_AT_A_TIME
from kvmap.fit.network import EPOCHS, LEAST_BATCHES, hidden_widths
from kvmap.fit.polish import PolishOptions, native_ends
from kvmap.fit.weights import BATCH, BOUNDARIES
from kvmap.footprint import fit_bytes, in_pieces, map_parameters, passing_bytes, row_bytes
from kvmap.geometry import Geometry
from kvmap.map_options import weight_shape
from kvmap.plan import forward_flops

# Accumulators, their bytes: float64.
WIDE = 8


@dataclass(frozen=True)
class ModelSize:
    """Of a model whose config is at hand.

    Attributes:
        parameters: Their number.
        tape: Numbers of a token that a layer keeps for a gradient, see `models.configs.tape_width`.
        itemsize: Bytes of one number.
    """

    parameters: int
    tape: int
    itemsize: int


@dataclass(frozen=True)
class FitSize:
    """A fit to plan.

    Attributes:
        recipe: With what is fitted.
        k: Source layers of each target layer.
        shapes: Of source and target.
        models: Their sizes; None where a config is not at hand.
        grid: N sequences of T tokens that were collected.
        options: How they were.
        moments: Bytes of their moments.
        itemsize: Bytes of a number of the dumped rows.
    """

    recipe: Recipe
    k: int
    shapes: tuple[Geometry, Geometry]
    models: tuple[ModelSize | None, ModelSize | None]
    grid: tuple[int, int]
    options: CollectOptions
    moments: int
    itemsize: int

    @property
    def regressions(self) -> tuple[int, int, int, int]:
        """Return mapped layers, groups of heads, inputs p and outputs q of keys or values."""
        mapped = self.shapes[1].layers - self.recipe.options.exact_layers
        k = min(self.k, self.shapes[0].layers)
        return mapped, *weight_shape(self.recipe.options, k, *self.shapes)

    @property
    def held_out(self) -> int:
        """Number of held-out sequences."""
        return held_out_count(self.grid[0], self.options.held_out)

    @property
    def rows(self) -> int:
        """Number of rows that count, of both splits."""
        kept = -(-self.grid[1] // self.options.stride)
        head = -(-self.recipe.options.native_head // self.options.stride)
        return self.grid[0] * max(kept - head, 0)

    @property
    def trained(self) -> int:
        """Number of rows that are fitted on."""
        return self.rows * (self.grid[0] - self.held_out) // self.grid[0]

    @property
    def whole_map(self) -> int:
        """Bytes of a map of whole weights, float32."""
        mapped, groups, p, q = self.regressions
        return 4 * mapped * len(KINDS) * groups * (p + 1) * q

    @property
    def weighted(self) -> int:
        """Bytes of the moments of weighted rows, one regression for each output."""
        mapped, groups, p, q = self.regressions
        return WIDE * mapped * len(KINDS) * groups * (p * p + p * q + p + 2 * q + 1)


Stage = tuple[int | None, float | None]


def stages(size: FitSize, rate: float) -> list[dict[str, Any]]:
    """Return what each stage of a fit takes: bytes at its peak, FLOPs and seconds here.

    None where the size of a model that a stage runs is not known.

    Args:
        rate: FLOP/s, as `plan.matmul_rate` measures it.
    """
    recipe = size.recipe
    found = {"row weights": _row_weights} if recipe.weights == "attention" else {}
    found |= {"closed form": _closed_form}
    found |= {"networks": _networks} if recipe.method != "closed-form" else {}
    found |= {"polish": _polish} if recipe.polish else {}
    rows = []
    for name, cost in found.items():
        memory, flops = cost(size)
        seconds = None if flops is None else flops / rate
        rows.append({"stage": name, "peak_bytes": memory, "flops": flops, "seconds": seconds})
    return rows


def most_bytes(planned: list[dict[str, Any]]) -> int | None:
    """Return the bytes that a fit holds where most is, None where a stage's are not known."""
    peaks = [row["peak_bytes"] for row in planned]
    return None if None in peaks else max(peaks)


def _closed_form(size: FitSize) -> Stage:
    mapped, groups, p, q = size.regressions
    weighted = size.recipe.weights == "attention"
    together = size.recipe.options.joint and not weighted
    count, outputs = (1, 2 * q) if together else (2, q)
    ridges = len(RIDGE_GRID) if size.recipe.ridge == "auto" else 1
    # A factor, a solution and its held-out error for each ridge.
    flops = mapped * groups * count * ridges * (p**3 / 3 + 4 * p * p * outputs)
    moments = size.moments + weighted * size.weighted
    return fit_bytes(size.recipe.options, size.k, *size.shapes, moments), float(flops)


def _row_weights(size: FitSize) -> Stage:
    """Two peaks: the target reads on, or a shard's rows are added, weighted."""
    (_, target), model = size.shapes, size.models[1]
    if model is None:
        return None, None
    mapped, groups, p, q = size.regressions
    sequences, length = size.grid
    kept = -(-length // size.options.stride)
    reads = 4 * sequences * kept * len(KINDS) * target.layers * target.kv_heads
    scaled = WIDE * sequences * kept * mapped * len(KINDS) * groups
    weights = model.parameters * model.itemsize
    passing = BATCH * length * passing_bytes(target, model.parameters, model.itemsize)
    scores = BATCH * target.query_heads * BOUNDARIES * length
    reading = weights + max(passing + 4 * 6 * scores + reads, 2 * reads)
    rows = min(size.options.shard, sequences) * kept
    # The pages of two shards, this one and the next; X and Y as they are, centred, and pulled.
    shards = min(2, -(-sequences // size.options.shard)) * rows
    late = len(size.options.late_layers(size.shapes[0]))
    adding = shards * sum(row_bytes(*size.shapes, size.itemsize, late))
    adding += WIDE * (rows * (3 * p + 2 * q) + p * p + p * q) + reads + scaled + size.weighted
    flops = forward_flops(model.parameters, target, size.grid)
    flops += (
        6
        * sequences
        * target.layers
        * BOUNDARIES
        * length
        * (target.query_heads * target.head_size)
    )
    flops += 2.0 * size.trained * mapped * len(KINDS) * groups * p * (p + q)
    return size.moments + max(reading, adding), float(flops)


def _networks(size: FitSize) -> Stage:
    """Rows of one layer's keys or values: raw and scaled, and a network that learns of them."""
    mapped, groups, p, q = size.regressions
    widths = (p, *hidden_widths(size.recipe.method, size.recipe.width), q)
    weights = groups * sum((a + 1) * b for a, b in pairwise(widths))
    batch = max(1, min(ROWS_AT_A_TIME, size.trained // LEAST_BATCHES))
    held_out = size.rows - size.trained
    rows = 4 * 2 * size.rows * groups * (p + q)
    # A step holds a batch's inputs, what each step makes of them and its gradient; or the
    # held-out rows pass.
    inner = sum(widths[1:])
    passing = 4 * groups * max(batch * (p + 3 * inner), held_out * 2 * max(widths[1:]))
    # Weights, their gradients, two moments of Adam, the best so far and the next best.
    made = 4 * mapped * len(KINDS) * weights
    memory = size.moments + 2 * size.whole_map + rows + passing + 4 * 6 * weights + made
    per_row = 6 * weights * size.trained + 2 * weights * held_out
    return memory, float(EPOCHS * mapped * len(KINDS) * per_row)


def _polish(size: FitSize) -> Stage:
    """What is kept, and a step at the end of its way forward, where everything is on the tape."""
    source, target = size.shapes
    if None in size.models:
        return None, None
    reads, speaks = size.models
    options, made = PolishOptions(steps=size.recipe.polish), size.recipe.options
    mapped, groups, p, q = size.regressions
    sequences, length = size.grid
    after = min(options.continuation, length // 4)
    head, tail = native_ends(made, length - after)
    cut = length - after - tail
    head = min(head, cut - 1)
    batch, run, asked = options.batch, options.batch * (tail + after), options.batch * (after + 1)
    own, other = (shape.kv_bytes_per_token(1) for shape in size.shapes)  # numbers of a token
    entry = own * 4 + other * speaks.itemsize  # of both caches; a source's are float32
    logits = 4 * asked * target.vocabulary

    weights = map_parameters(size.recipe, size.k, source, target)
    whole = size.whole_map if size.recipe.rank else 0
    distinct = min(mapped, math.comb(source.layers, min(size.k, source.layers)))
    frames = 4 * distinct * (1 if made.joint else 2) * groups * p * (p if p <= MOST_INPUTS else 1)
    each = length * (own * reads.itemsize + other * speaks.itemsize)
    draws = options.steps * batch
    known = min(sequences - size.held_out, draws)
    readings = min(known * each, KEPT_BYTES)
    unseen = min(options.held_out, size.held_out)
    halves = (unseen + 1) // 2, unseen // 2
    seen = halves[0] * cut + halves[1] * (max(length // 2, after + 3) - after - tail)
    lessons = seen * entry + 4 * unseen * (after + 1) * target.vocabulary
    models = sum(model.parameters * model.itemsize for model in size.models)
    # Weights as they were, as they are and at their best, and two moments of Adam.
    held = models + whole + 4 * 5 * weights + frames + readings + lessons
    # Before, while moments are still there: a Gram matrix, its factor, inverse, and copies.
    square = p * p if p <= MOST_INPUTS else p
    making = size.moments + models + whole + 4 * weights + frames + 6 * WIDE * square

    wide = target.kv_heads * source.head_size if made.heads == "matched" else source.width
    inputs = 2 * (source.layers + made.late_layers(source)) * wide + 2 * made.anchor * target.width
    context = batch * (cut - head)
    outputs = 4 * 2 * context * target.width * mapped
    past = batch * cut * other * speaks.itemsize if head or speaks.itemsize != 4 else 0
    queries = target.query_heads * target.head_size
    tape = mapped * (run * speaks.tape + 2 * (batch * cut + run) * queries) * speaks.itemsize
    step = batch * cut * entry + 4 * weights + 4 * context * inputs + outputs + past + tape
    # Native logits and mapped ones; of their size KL has five and a mask at a time. What is on
    # the tape of them, two and the mask, is still there when the error of the cache joins it.
    speaking = max(29 * logits // 4, 17 * logits // 4 + outputs)
    forward = in_pieces(step, 4 * context * target.width) + in_pieces(speaking, logits)

    read = known if known * each <= KEPT_BYTES else draws
    flops = sum(
        forward_flops(model.parameters, shape, (read, length))
        for model, shape in zip(size.models, size.shapes, strict=True)
    )
    spoken = forward_flops(speaks.parameters, target, (1, tail + after))
    spoken += 4 * target.layers * queries * cut * (tail + after)
    white = 2 * mapped * len(KINDS) * groups * q * p * (p if p <= MOST_INPUTS else 1)
    # The native continuation, the mapped one, its gradient; a map's product and its weight's.
    flops += options.steps * (3 * batch * spoken + 4.0 * weights * batch * cut + 2 * white)
    looks = options.steps // options.every + 1
    flops += looks * (unseen * spoken + 2.0 * weights * seen + white)
    return max(making, held + forward), float(flops)
