"""Bench several maps or pairs in one run, as one report."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvmap.bench.against import vllm_prefill
from kvmap.bench.alone import growth
from kvmap.bench.clock import Clock
from kvmap.bench.layered import bench_random
from kvmap.bench.machine import Machine, measure_machine
from kvmap.bench.pair import BenchOptions, bench_pair
from kvmap.bench.prepare import prepared_map
from kvmap.bench.shapes import config_of
from kvmap.collect_pair import Loading
from kvmap.engine import compute_dtype, prepare
from kvmap.errors import UsageError
from kvmap.fit import DEFAULT_RECIPE, recipe
from kvmap.fit.recipes import preset_of
from kvmap.header import sound
from kvmap.mapping import CacheMap
from kvmap.models.configs import shape_of
from kvmap.models.devices import pick_device, pick_dtype

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Job:
    """One map to measure.

    Attributes:
        names: Source and target.
        recipe: Of the map that is made where no file is given, else what the file's was fitted by.
        path: The map's file.
    """

    names: tuple[str, str]
    recipe: str | None
    path: Path | None = None


def jobs_of(path: Path | None, pair: str, both: bool, recipes: str | None) -> list[Job]:
    """Return what to measure: one map by its file, or a pair's by recipe and direction.

    Args:
        pair: Two names joined by a comma.
        recipes: Names joined by commas.

    Raises:
        UsageError: The pair is none, or a recipe or the map's file is unknown.
    """
    if path is not None:
        cmap = CacheMap.load(path)
        with sound(path, "map"):
            preset = preset_of(cmap.provenance)
        return [Job((cmap.source.name, cmap.target.name), preset, path)]
    names = tuple(name.strip() for name in pair.split(","))
    if len(names) != 2 or not all(names):
        raise UsageError(f"found --pair {pair!r}, expected two models joined by a comma")
    presets = [name.strip() for name in (recipes or DEFAULT_RECIPE).split(",")]
    for name in presets:
        recipe(name)
    return [
        Job(way, name) for way in ((names, names[::-1]) if both else (names,)) for name in presets
    ]


def check_lengths(jobs: list[Job], contexts: list[int], trust_remote_code: bool = False) -> None:
    """Check that both models of every job read contexts so long.

    Raises:
        UsageError: One does not.
    """
    for job in jobs:
        if job.path is not None:
            cmap = CacheMap.load(job.path)
            shapes = (cmap.source.geometry, cmap.target.geometry)
        else:
            shapes = tuple(shape_of(config_of(name, trust_remote_code)) for name in job.names)
        for name, shape in zip(job.names, shapes, strict=True):
            shape.require_positions(name, max(contexts), "--context", "give smaller ones")


def map_path(job: Job, loading: Loading, progress: Progress) -> Path:
    """Return a job's map, made where no file is given."""
    return job.path or prepared_map(job.names, job.recipe, loading, progress=progress).path


def machine_of(loading: Loading, options: BenchOptions) -> Machine:
    """Measure the machine in the dtype that is fastest on it of those that will do.

    Raises:
        UsageError: Several devices are asked for.
    """
    place = pick_device(loading.device)
    if place == "spread":
        raise UsageError("found --device spread, but bench times one device; name it, or leave it")
    clock = Clock(torch.device(place), options.cpu_time)
    return measure_machine(
        clock, compute_dtype(pick_dtype(loading.dtype, place), clock.device.type)
    )


def bench_maps(
    jobs: list[Job],
    contexts: list[int],
    loading: Loading,
    options: BenchOptions,
    progress: Progress = lambda step, done, total: None,
) -> dict[str, Any]:
    """Measure maps between models at hand; a map that is not given is made, or reused."""
    machine = machine_of(loading, options)
    measured, maps = [], []
    for job in jobs:
        path = map_path(job, loading, progress)
        started = time.perf_counter()
        cmap = prepare(CacheMap.load(path), machine.device)
        maps.append({"map": str(path), "load_seconds": time.perf_counter() - started})
        here = replace(loading, device=machine.device)
        source, target = map(here.open, job.names)
        found = bench_pair(cmap, source, target, contexts, options, machine, progress)
        measured += [{"recipe": job.recipe, **one.to_json()} for one in found]
    return _document(machine, maps, measured)


def bench_shapes(
    jobs: list[Job],
    contexts: list[int],
    loading: Loading,
    options: BenchOptions,
    progress: Progress = lambda step, done, total: None,
) -> dict[str, Any]:
    """Measure random maps between random models of published shapes."""
    machine = machine_of(loading, options)
    dtype = pick_dtype(loading.dtype, machine.device)
    measured = []
    for job in jobs:
        found = bench_random(
            job.names, recipe(job.recipe), contexts, options, machine, dtype, progress
        )
        measured += [{"recipe": job.recipe, **one.to_json()} for one in found]
    return _document(machine, [], measured)


def _document(machine: Machine, maps: list[Any], measured: list[Any]) -> dict[str, Any]:
    grown = growth(measured)
    return {"machine": machine.to_json(), "maps": maps, "contexts": measured, "growth": grown}


def against_vllm(
    report: dict[str, Any], jobs: list[Job], loading: Loading, options: BenchOptions
) -> None:
    """Put vLLM's prefill into a report in the place of transformers'."""
    clock = Clock(torch.device(report["machine"]["device"]), options.cpu_time)
    contexts = sorted({one["tokens"] for one in report["contexts"]})
    for name in {job.names[1] for job in jobs}:
        found = vllm_prefill(name, contexts, clock, loading, options.budget, options.seed)
        for one in report["contexts"]:
            if one["target"] == name:
                _replace_baseline(one, found[one["tokens"]].median)


def _replace_baseline(one: dict[str, Any], seconds: float) -> None:
    cold = one["source_prefill_seconds"] + one["handoff_seconds"]
    one |= {
        "against": "vllm",
        "target_prefill_seconds": seconds,
        "warm_speedup": seconds / one["handoff_seconds"],
        "cold_speedup": seconds / cold,
    }
