"""Time the map alone, over made-up caches of any length, and how its cost grows with tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import log
from statistics import linear_regression
from typing import Any

import torch

from kvmap.bench.clock import Clock, Round, timings
from kvmap.bench.costs import map_cost
from kvmap.bench.layers import products_alone
from kvmap.bench.machine import Machine
from kvmap.bench.memory import peak_bytes
from kvmap.bench.pair import BenchOptions
from kvmap.cache import KVCache
from kvmap.columns import KINDS
from kvmap.engine import allocate, empty_cache
from kvmap.geometry import Geometry
from kvmap.mapping import CacheMap

# Short contexts are mapped several times in a row, until so many tokens are through.
ROUND_TOKENS = 8192


def bench_map(
    cmap: CacheMap,
    contexts: list[int],
    options: BenchOptions,
    machine: Machine,
    dtype: torch.dtype,
) -> list[dict[str, Any]]:
    """Measure a map at some lengths of context, all of them in every round.

    Args:
        dtype: Of the caches.

    Returns:
        By context; `products_seconds` are those of the map's products alone, operands ready,
        None for a map that is more than products.
    """
    device = torch.device(machine.device)
    clock, tokens = Clock(device, options.cpu_time), max(contexts)
    cache = _drawn(cmap.source.geometry, tokens, device, dtype, options.seed)
    own = _drawn(cmap.target.geometry, tokens, device, dtype, options.seed + 1)
    first = tuple(t for pair in zip(own.keys, own.values, strict=True) for t in pair)
    first = first[: 2 * cmap.options.read_layers]
    out = allocate(cmap.target.geometry, cache)
    linear = not any(layer.of(kind).network for layer in cmap.layers if layer for kind in KINDS)

    def run(count: int) -> None:
        part = tuple(tensor[:, :, :count] for tensor in first) or None
        cmap.apply(cache.slice(0, count), part, out.slice(0, count))

    def one_round() -> Round:
        seconds = {}
        for count in contexts:
            times = max(1, min(tokens, ROUND_TOKENS) // count)
            seconds[f"map {count}"] = _seconds(run, count, times, clock)
            if linear:
                seconds[f"products {count}"] = products_alone(cmap, count, clock)
        return seconds

    times = timings(one_round, options.budget * len(contexts), options.repeats)
    rows = []
    for count in contexts:
        timing = times[f"map {count}"]
        alone = times[f"products {count}"].median if linear else None
        rows.append(
            {
                "source": cmap.source.name,
                "target": cmap.target.name,
                "tokens": count,
                "map_seconds": timing.median,
                "products_seconds": alone,
                "products_share": alone and alone / timing.median,
                "extra_bytes": peak_bytes(lambda n=count: run(n), device),
                "rounds": len(timing.seconds),
                "spread": {"map": timing.to_json()},
                **map_cost(cmap, count, dtype.itemsize).shares(timing.median, machine),
            }
        )
    return rows


def _drawn(
    geometry: Geometry, tokens: int, device: torch.device, dtype: torch.dtype, seed: int
) -> KVCache:
    """Draw a cache [1, H, T, D] per layer."""
    generator = torch.Generator(device).manual_seed(seed)
    made = empty_cache(geometry, torch.arange(tokens, device=device)[None], dtype)
    for tensor in (*made.keys, *made.values):
        tensor.normal_(generator=generator)
    return made


def _seconds(run: Callable[[int], None], tokens: int, times: int, clock: Clock) -> float:
    """Return the seconds of one run, as the mean of several in a row."""
    return clock.timed(lambda: [run(tokens) for _ in range(times)])[1] / times


def growth(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return by map the exponent e of its seconds ~ tokensᵉ, and the most extra memory.

    Maps that were measured at one length of context are left out.
    """
    by_map: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        by_map.setdefault((row["source"], row["target"], row["recipe"]), []).append(row)
    found = []
    for (source, target, recipe), own in by_map.items():
        tokens = [row["tokens"] for row in own]
        if len(set(tokens)) < 2:
            continue
        seconds = [log(max(row["map_seconds"], 1e-12)) for row in own]
        found.append(
            {
                "source": source,
                "target": target,
                "recipe": recipe,
                "tokens": [min(tokens), max(tokens)],
                "map_exponent": linear_regression([log(n) for n in tokens], seconds).slope,
                "extra_bytes": max(row["extra_bytes"] for row in own),
            }
        )
    return found
