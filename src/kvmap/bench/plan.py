"""What a bench will hold and about how long it will take, from configs alone."""

from __future__ import annotations

from typing import Any

from kvmap.bench.costs import attention_flops
from kvmap.bench.pair import BenchOptions
from kvmap.bench.run import Job, machine_of
from kvmap.bench.shapes import config_of
from kvmap.collect_pair import Loading
from kvmap.fit import DEFAULT_RECIPE, recipe
from kvmap.footprint import map_parameters
from kvmap.geometry import Geometry
from kvmap.mapping import CacheMap
from kvmap.models.configs import parameter_count, shape_of
from kvmap.models.devices import pick_device, pick_dtype
from kvmap.plan import USUAL_K

# A round prefills once on either side, and the bench runs at least about this many rounds.
ROUNDS = 3


def _parameters(job: Job, shapes: list[Geometry]) -> int:
    """Return the weights of a job's map: those of its file, or of its recipe's usual one."""
    if job.path is not None:
        return CacheMap.load(job.path).parameters
    chosen = recipe(job.recipe or DEFAULT_RECIPE)
    k = USUAL_K if chosen.k == "auto" else int(chosen.k)
    return map_parameters(chosen, k, *shapes)


def plan(jobs: list[Job], contexts: list[int], loading: Loading) -> list[dict[str, Any]]:
    """Return, for each job and context, bytes of both caches, FLOPs and rough seconds."""
    place, trust = pick_device(loading.device), loading.trust_remote_code
    dtype = pick_dtype(loading.dtype, place)
    rate = machine_of(loading, BenchOptions()).matmul_flops
    rows = []
    for job in jobs:
        names, name = job.names, job.recipe
        configs = [config_of(side, trust) for side in names]
        shapes = [shape_of(config) for config in configs]
        per_token = 2 * _parameters(job, shapes)
        for tokens in contexts:
            prefill = sum(
                2.0 * parameter_count(config, trust) * tokens + attention_flops(shape, tokens)
                for config, shape in zip(configs, shapes, strict=True)
            )
            rows.append(
                {
                    "source": names[0],
                    "target": names[1],
                    "recipe": name,
                    "tokens": tokens,
                    "cache_bytes": tokens
                    * sum(shape.kv_bytes_per_token(dtype.itemsize) for shape in shapes),
                    "map_flops": float(per_token) * tokens,
                    "prefill_flops": prefill,
                    "seconds": ROUNDS * (prefill + per_token * tokens) / rate,
                }
            )
    return rows
