"""What a pair costs before any work: bytes per token, maps, dumps, moments, memory and time.

Sizes follow from the geometries alone; times from FLOPs over a matmul rate measured here.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from kvmap.chosen import Layers, chosen_groups
from kvmap.collect import CollectOptions
from kvmap.columns import LOOKBACK, groups, head_sizes
from kvmap.fit.recipes import RECIPES
from kvmap.geometry import Geometry
from kvmap.map_options import MapOptions, weight_shape

# Above these bytes of accumulators, moments of all heads, then joint ones, are not the default.
ALL_HEADS_BYTES = 4 << 30
JOINT_BYTES = 16 << 30

TWO_PASSES = (
    "choose layers on a sample first (`kvmap collect --sequences 64 --heads matched --no-joint "
    "-o CALIB`, then `kvmap select-layers CALIB -k 4 --recipe paper -o LAYERS`) and collect with "
    "`--layers LAYERS`"
)


@dataclass(frozen=True)
class Cost:
    """What one stage takes; None where it is not known beforehand."""

    disk_bytes: int
    memory_bytes: int | None
    flops: float | None
    seconds: float | None


def map_parameters(options: MapOptions, k: int, source: Geometry, target: Geometry) -> int:
    """Return the number of weights and biases of a map with k source layers per target layer."""
    mapped = target.layers - options.exact_layers
    heads, inputs, outputs = weight_shape(options, min(k, source.layers), source, target)
    return mapped * 2 * heads * (inputs + 1) * outputs


def map_flops_per_token(options: MapOptions, k: int, source: Geometry, target: Geometry) -> int:
    """Return the multiply-adds, counted twice, of mapping one token."""
    return 2 * map_parameters(options, k, source, target)


def moments_bytes(
    source: Geometry, target: Geometry, heads: str, joint: bool, layers: Layers | None = None
) -> int:
    """Return the bytes of train and held-out moments, of all layers or of a choice."""
    total = 0
    sizes = head_sizes(source, target)
    found = groups(source, target, heads, joint)
    for group in found if layers is None else chosen_groups(found, layers, sizes):
        p = sum(sizes[block.side] for block in group.inputs)
        q = sum(sizes[block.side] for block in group.outputs)
        total += p * p + p * q + p + 2 * q + 1
    return 2 * 8 * total


def moments_scope(
    source: Geometry, target: Geometry, layers: Layers | None = None
) -> tuple[str, bool]:
    """Return the widest scope of moments (heads, joint) that stays within memory bounds."""
    if moments_bytes(source, target, "all", True, layers) <= ALL_HEADS_BYTES:
        return "all", True
    return "matched", moments_bytes(source, target, "matched", True, layers) <= JOINT_BYTES


def too_large(source: Geometry, target: Geometry, options: CollectOptions) -> str | None:
    """Say what to do where the moments do not fit in the memory that is free here."""
    scope = (options.heads, options.joint, options.layers)
    needed = moments_bytes(source, target, *scope) if options.moments else 0
    free = free_memory("cpu")
    if needed <= free:
        return None
    return (
        f"the moments of {options.heads} heads would take {needed / 1e9:.1f} GB, "
        f"{free / 1e9:.1f} GB are free here; {'give fewer heads' if options.layers else TWO_PASSES}"
    )


def dump_bytes(
    source: Geometry,
    target: Geometry,
    options: CollectOptions,
    shape: tuple[int, int],
    itemsize: int,
) -> int:
    """Return the bytes of the dump of [N, T] tokens."""
    rows = shape[0] * -(-shape[1] // options.stride)
    back = 2 * LOOKBACK * source.width * itemsize
    return rows * (back + sum(g.kv_bytes_per_token(itemsize) for g in (source, target)))


def forward_flops(parameters: int, geometry: Geometry, shape: tuple[int, int]) -> float:
    """Return the FLOPs of prefilling N sequences of T tokens, causal attention included."""
    sequences, length = shape
    attention = 2 * geometry.layers * geometry.query_heads * geometry.head_size * length
    return float(sequences * length) * (2 * parameters + attention)


def collect_cost(
    models: tuple[tuple[Geometry, int], tuple[Geometry, int]],
    shape: tuple[int, int],
    options: CollectOptions,
    itemsize: int,
    rate: float | None = None,
) -> Cost:
    """Return what `collect` takes.

    Args:
        models: Geometry and number of parameters of source and target.
        shape: N sequences of T tokens.
        rate: FLOP/s; measured here if not given.
    """
    (source, source_size), (target, target_size) = models
    scope = (options.heads, options.joint, options.layers)
    moments = moments_bytes(source, target, *scope) if options.moments else 0
    dump = dump_bytes(source, target, options, shape, itemsize)
    per_row = (
        sum(2 * p * (p + q) for p, q in _group_sizes(source, target, options))
        if options.moments
        else 0
    )
    rows = shape[0] * -(-shape[1] // options.stride)
    flops = sum(forward_flops(size, g, shape) for g, size in models) + per_row * rows
    batch = options.batch * shape[1] * max(g.kv_bytes_per_token(itemsize) for g in (source, target))
    shard = dump // max(1, -(-shape[0] // options.shard))
    memory = (source_size + target_size) * itemsize + batch + 2 * shard + moments
    disk = (dump if options.dump else 0) + moments
    return Cost(disk, memory, flops, flops / (rate or matmul_rate()))


def _group_sizes(
    source: Geometry, target: Geometry, options: CollectOptions
) -> list[tuple[int, int]]:
    sizes = head_sizes(source, target)
    found = groups(source, target, options.heads, options.joint)
    if options.layers is not None:
        found = chosen_groups(found, options.layers, sizes)
    return [
        (sum(sizes[b.side] for b in group.inputs), sum(sizes[b.side] for b in group.outputs))
        for group in found
    ]


def map_table(
    source: Geometry, target: Geometry, itemsize: int = 2
) -> list[dict[str, float | str]]:
    """Return bytes and FLOPs per token of each recipe's map for several k."""
    rows = []
    for name, recipe in RECIPES.items():
        for k in (1, 4, 8) if recipe.k == "auto" else (int(recipe.k),):
            parameters = map_parameters(recipe.options, k, source, target)
            flops = map_flops_per_token(recipe.options, k, source, target)
            rows.append(
                {
                    "recipe": name,
                    "k": min(k, source.layers),
                    "bytes": parameters * itemsize,
                    "flops_per_token": flops,
                }
            )
    return rows


def matmul_rate(size: int = 512, seconds: float = 0.1) -> float:
    """Return FLOP/s of a square fp32 product, measured for about `seconds`."""
    a = torch.randn(size, size)
    a @ a
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        a @ a
        count += 1
    return count * 2 * size**3 / (time.perf_counter() - started)


def fits_together(weight_bytes: tuple[int | None, int | None], device: str) -> bool:
    """Return whether two models fit side by side with a quarter of the memory to spare."""
    if None in weight_bytes:
        return True
    return sum(weight_bytes) <= 0.75 * free_memory(device)


def free_memory(device: str) -> int:
    """Return the free bytes of a device; of the machine for a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
