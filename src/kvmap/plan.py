"""What a pair costs before any work: dumps, moments, memory and time.

Sizes follow from the geometries alone; times from FLOPs over a matmul rate measured here.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvmap import atomic
from kvmap.calibration_files import Scope
from kvmap.chosen import Layers
from kvmap.collect_options import CollectOptions
from kvmap.columns import first_and_middle
from kvmap.fit.recipes import Recipe
from kvmap.footprint import (
    accumulator_bytes,
    collect_bytes,
    group_shapes,
    row_bytes,
)
from kvmap.geometry import Geometry
from kvmap.models.devices import SHARDED

# Above these bytes of accumulators, moments of all heads, then joint ones, are not the default.
ALL_HEADS_BYTES = 4 << 30
JOINT_BYTES = 16 << 30
# Sequences on which layers are chosen, and the k of "auto", where moments of all do not fit.
SAMPLE = 64
USUAL_K = 8

TWO_PASSES = (
    "`kvmap fit SOURCE TARGET` goes on in two passes by itself; or choose layers on a sample first "
    f"(`kvmap collect --sequences {SAMPLE} --heads matched --no-joint -o CALIB`, then "
    "`kvmap select-layers CALIB -k {k} --recipe paper -o LAYERS`) and collect with "
    "`--layers LAYERS`"
)


@dataclass(frozen=True)
class Cost:
    """What one stage takes; None where it is not known beforehand."""

    disk_bytes: int
    memory_bytes: int | None
    flops: float | None
    seconds: float | None


def moments_bytes(source: Geometry, target: Geometry, scope: Scope) -> int:
    """Return the bytes of train and held-out moments."""
    options = CollectOptions(**vars(scope))
    return accumulator_bytes(group_shapes(source, target, options))


def moments_scope(source: Geometry, target: Geometry, layers: Layers | None = None) -> Scope:
    """Return the widest scope of moments that stays within bounds of memory."""
    wide = Scope("all", True, layers, first_and_middle(source))
    if moments_bytes(source, target, wide) <= ALL_HEADS_BYTES:
        return wide
    matched = replace(wide, heads="matched")
    return replace(matched, joint=moments_bytes(source, target, matched) <= JOINT_BYTES)


def scope_for(recipe: Recipe, widest: Scope) -> Scope:
    """Return which moments are kept for a recipe: what fits in memory, what it reads at least."""
    options = recipe.options
    late = options.lookback_layers if options.lookback else ()
    return Scope(
        "all" if options.heads == "all" else widest.heads,
        widest.joint or options.mixed,
        widest.layers,
        tuple(sorted({*widest.lookback_layers, *late})),
    )


def too_large(source: Geometry, target: Geometry, options: CollectOptions) -> str | None:
    """Say what to do where the moments do not fit in the memory that is free here."""
    needed = moments_bytes(source, target, options.scope) if options.moments else 0
    free = free_memory("cpu")
    if needed <= free:
        return None
    hint = TWO_PASSES.format(k=min(USUAL_K, source.layers))
    if options.layers:
        hint = _smaller(source, target, options, free)
    elif options.heads == "matched" and not options.joint:
        hint = "no smaller ones tell which layers to choose, so this takes a machine with more"
    return f"{_needed(options, needed, free)}; {hint}"


def _smaller(source: Geometry, target: Geometry, options: CollectOptions, free: int) -> str:
    """Say by which options the moments of chosen layers would fit, if by any."""
    late = options.late_layers(source) if options.joint else ()
    ways, least = [], options
    if options.heads == "all":
        ways, least = [*ways, "--heads matched"], replace(least, heads="matched")
    if max(map(len, options.layers)) > 1:
        layers = tuple(row[:1] for row in options.layers)
        ways, least = [*ways, "a smaller -k"], replace(least, layers=layers)
    if len(late) > 1:
        ways = [*ways, f"--lookback-layers {late[0]}"]
        least = replace(least, lookback_layers=late[:1])
    if moments_bytes(source, target, least.scope) > free:
        return "this takes a machine with more"
    return f"give {' or '.join(ways)}"


def two_passes(
    source: Geometry, target: Geometry, options: CollectOptions, k: int | str
) -> str | None:
    """Say that and why a fit goes on in two passes; None where all moments fit in memory."""
    if options.layers is not None or too_large(source, target, options) is None:
        return None
    needed = moments_bytes(source, target, options.scope)
    most = min(USUAL_K, source.layers)
    wanted = f"at most {most}" if k == "auto" else min(k, source.layers)
    return (
        f"in two passes, since {_needed(options, needed, free_memory('cpu'))}: a sample of "
        f"{SAMPLE} sequences chooses {wanted} source layers per target layer, then moments of "
        "these alone are kept"
    )


def sample_of(options: CollectOptions) -> CollectOptions:
    """Return what is kept of a sample on which layers are chosen: what one-layer probes read."""
    return replace(options, heads="matched", joint=False, layers=None, dump=False, moments=True)


def _needed(options: CollectOptions, needed: int, free: int) -> str:
    return (
        f"the moments of {options.heads} heads would take {needed / 1e9:.1f} GB, "
        f"{free / 1e9:.1f} GB are free here"
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
    return rows * sum(row_bytes(source, target, itemsize, len(options.late_layers(source))))


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
    rate: float,
) -> Cost:
    """Return what `collect` takes.

    Args:
        models: Geometry and number of parameters of source and target.
        shape: N sequences of T tokens.
        rate: FLOP/s, as `matmul_rate` measures it.
    """
    (source, source_size), (target, target_size) = models
    moments = moments_bytes(source, target, options.scope) if options.moments else 0
    dump = dump_bytes(source, target, options, shape, itemsize)
    per_row = sum(2 * p * (p + q) for p, q in group_shapes(source, target, options))
    rows = shape[0] * -(-shape[1] // options.stride)
    flops = sum(forward_flops(size, g, shape) for g, size in models) + per_row * rows
    together = fits_together((source_size * itemsize, target_size * itemsize), "cpu")
    memory = collect_bytes(models, shape, options, itemsize, together)
    disk = (dump if options.dump else 0) + moments
    return Cost(disk, memory, flops, flops / rate)


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
    """Return the free bytes of a device, of all for a model on all; of the machine for a CPU."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    if device in ("spread", SHARDED) and torch.cuda.is_available():
        return sum(torch.cuda.mem_get_info(at)[0] for at in range(torch.cuda.device_count()))
    # Pages of files that were read are free for the asking, though not counted as free pages.
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_disk(folder: Path) -> int:
    """Return the free bytes of the file system on which a folder is or would be made.

    Raises:
        KvmapError: It cannot be made, since what is above is no folder or not to be written to.
    """
    whole = folder.absolute()
    above = next(path for path in (whole, *whole.parents) if os.path.exists(path))
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise atomic.no_folder(folder, "Not a directory" if above.is_file() else "not writable")
    return shutil.disk_usage(above).free
