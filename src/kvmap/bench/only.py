"""Time one part of the work by itself: a map, a streaming session, or a fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kvmap.bench.alone import bench_map, growth
from kvmap.bench.fitting import bench_fit
from kvmap.bench.pair import BenchOptions
from kvmap.bench.run import Job, machine_of, map_path
from kvmap.bench.shapes import config_of, deepened, random_map, random_model
from kvmap.bench.stream import bench_stream
from kvmap.collect_pair import Loading
from kvmap.engine import prepare
from kvmap.errors import UsageError
from kvmap.fit import recipe
from kvmap.geometry import Signature
from kvmap.mapping import CacheMap
from kvmap.models.devices import pick_dtype

PARTS = ("map", "stream", "fit")
Progress = Callable[[str, int, int], None]


def bench_only(
    part: str,
    jobs: list[Job],
    contexts: list[int],
    loading: Loading,
    options: BenchOptions,
    random: bool,
    progress: Progress = lambda step, done, total: None,
) -> dict[str, Any]:
    """Return the machine and what was measured of one part, under its name.

    Args:
        part: One of `PARTS`.
        random: The pair is known by its shapes alone; a fit is always timed so.

    Raises:
        UsageError: The part cannot be timed like that.
    """
    if part == "stream" and random:
        raise UsageError("--only stream runs both models; leave --random-weights out")
    if part == "fit" and any(job.path for job in jobs):
        raise UsageError("--only fit times a recipe at a pair's shapes; give --pair, no MAP")
    machine = machine_of(loading, options)
    device, dtype = torch.device(machine.device), pick_dtype(loading.dtype, machine.device)
    rows = []
    for done, job in enumerate(jobs):
        if part == "fit":
            made = recipe(job.recipe)
            found = [bench_fit(job.names, made, max(contexts), options, device, dtype)]
        else:
            cmap = (
                _random_map(job, device, dtype)
                if random
                else prepare(CacheMap.load(map_path(job, loading, progress)), device)
            )
            if part == "map":
                found = bench_map(cmap, contexts, options, machine, dtype)
            else:
                pair = map(replace(loading, device=machine.device).open, job.names)
                found = bench_stream(cmap, *pair, contexts, options)
        rows += [{"recipe": job.recipe, **one} for one in found]
        progress(part, done + 1, len(jobs))
    grown = {"growth": growth(rows)} if part == "map" else {}
    return {"machine": machine.to_json(), part: rows, **grown}


def _random_map(job: Job, device: torch.device, dtype: torch.dtype) -> CacheMap:
    """Return a map of a recipe's full shape; one layer of each model is built for its RoPE."""
    sides = tuple(_signature(name, device, dtype) for name in job.names)
    return prepare(random_map(sides, recipe(job.recipe), device, dtype), device)


def _signature(name: str, device: torch.device, dtype: torch.dtype) -> Signature:
    one = random_model(name, device, dtype, depth=1)
    return replace(one.signature, geometry=deepened(one, config_of(name).num_hidden_layers))
