"""How fast: what a handoff takes beside the target's own prefill, on this machine."""

from kvmap.bench.clock import Timing, timings
from kvmap.bench.machine import Machine, measure_machine
from kvmap.bench.pair import BenchOptions, Context, bench_pair
from kvmap.bench.prepare import prepared_map

__all__ = [
    "BenchOptions",
    "Context",
    "Machine",
    "Timing",
    "bench_pair",
    "measure_machine",
    "prepared_map",
    "timings",
]
