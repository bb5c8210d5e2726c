"""Time rounds of work: warmed up, synchronised, as often as a time budget allows.

What is compared runs in the same round, one after the other, so that a busy machine slows
both; a ratio is the ratio of two medians over the same rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

MOST_ROUNDS = 30
Round = dict[str, float]


@dataclass(frozen=True)
class Timing:
    """Seconds that one kind of work took in each round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The p50."""
        return median(self.seconds)

    @property
    def p95(self) -> float:
        """The 95th percentile, by the nearest rank: the maximum of fewer than twenty rounds."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, -(-95 * len(ordered) // 100) - 1)]

    @property
    def spread(self) -> float:
        """Range over median."""
        return (max(self.seconds) - min(self.seconds)) / max(self.median, 1e-12)

    def to_json(self) -> dict[str, float]:
        """Return median, p95 and spread."""
        return {"p50_seconds": self.median, "p95_seconds": self.p95, "spread": self.spread}


@dataclass(frozen=True)
class Clock:
    """Reads seconds once the device has done all it was given.

    Attributes:
        cpu_time: Count this process's time on the CPU, all threads together, instead of the
            wall's: for a machine that does other work meanwhile.
    """

    device: torch.device
    cpu_time: bool = False

    def now(self) -> float:
        """Wait for the device and return the time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.process_time() if self.cpu_time else time.perf_counter()

    def timed(self, run: Callable[[], Any]) -> tuple[Any, float]:
        """Return what a function returned and the seconds it took."""
        started = self.now()
        result = run()
        return result, self.now() - started


def timings(
    run: Callable[[], Round], budget: float, repeats: int | None = None
) -> dict[str, Timing]:
    """Run rounds and return the seconds of each part.

    Args:
        run: One round: seconds by part, the same parts every time.
        budget: Seconds after which no further round starts; at least one is run.
        repeats: Exactly so many rounds instead.
    """
    started = time.perf_counter()
    first = run()
    # A short first round only warms up: pages, caches, lazily built kernels.
    rounds = [] if time.perf_counter() - started < budget / 4 or repeats else [first]
    while len(rounds) < (repeats or MOST_ROUNDS):
        if rounds and not repeats and time.perf_counter() - started > budget:
            break
        rounds.append(run())
    return {name: Timing(tuple(one[name] for one in rounds)) for name in first}
