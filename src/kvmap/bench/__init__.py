"""How fast: what a handoff takes beside the target's own prefill, on this machine."""

from kvmap.bench.clock import Clock, Timing, timings
from kvmap.bench.machine import Machine, measure_machine
from kvmap.bench.only import PARTS, bench_only
from kvmap.bench.pair import BenchOptions, Context, bench_pair
from kvmap.bench.plan import plan
from kvmap.bench.plot import plot
from kvmap.bench.prepare import prepared_map
from kvmap.bench.run import (
    Job,
    against_vllm,
    bench_maps,
    bench_shapes,
    check_lengths,
    jobs_of,
)

__all__ = [
    "PARTS",
    "BenchOptions",
    "Clock",
    "Context",
    "Job",
    "Machine",
    "Timing",
    "against_vllm",
    "bench_maps",
    "bench_only",
    "bench_pair",
    "bench_shapes",
    "check_lengths",
    "jobs_of",
    "measure_machine",
    "plan",
    "plot",
    "prepared_map",
    "timings",
]
