"""Time a handoff between two loaded models beside the target's own prefill.

Warm: the source's cache is there, as in a running session; from it to the target's next-token
logits, everything counted. Cold: the source's prefill is counted too. Both models use the same
dtype, scaled-dot-product attention, and compute logits for the last token only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvmap.bench.clock import Clock, Round, Timing, timings
from kvmap.bench.costs import map_cost
from kvmap.bench.machine import Machine
from kvmap.bench.memory import peak_bytes
from kvmap.cache import KVCache
from kvmap.handoff import handoff
from kvmap.mapping import CacheMap
from kvmap.models import LoadedModel, prefill

WARM_UP_TOKENS = 128


@dataclass(frozen=True)
class BenchOptions:
    """How long to measure.

    Attributes:
        budget: Seconds per context after which no further round starts.
        repeats: Exactly so many rounds instead.
        seed: Of the tokens.
        cpu_time: Count the process's time on the CPU instead of the wall's.
    """

    budget: float = 20.0
    repeats: int | None = None
    seed: int = 0
    cpu_time: bool = False


@dataclass(frozen=True)
class Context:
    """What was measured at one length of context.

    Attributes:
        parts: "source_prefill", "map", "build" (laying out the target's cache), "first_token"
            (exact head, first layer and tail), "handoff" (the last three), "target_prefill".
        peak_bytes: Most memory the handoff held beside models and source cache.
        extra_bytes: The same without the target's cache it leaves behind.
    """

    tokens: int
    parts: dict[str, Timing]
    peak_bytes: int
    extra_bytes: int
    record: dict[str, Any]

    @property
    def warm_speedup(self) -> float:
        """The target's prefill over the handoff."""
        return self.parts["target_prefill"].median / self.parts["handoff"].median

    @property
    def cold_speedup(self) -> float:
        """The target's prefill over the source's prefill and the handoff."""
        cold = self.parts["source_prefill"].median + self.parts["handoff"].median
        return self.parts["target_prefill"].median / cold

    def to_json(self) -> dict[str, Any]:
        """Return the keys of the contract, and more."""
        medians = {f"{name}_seconds": timing.median for name, timing in self.parts.items()}
        return {
            **self.record,
            "tokens": self.tokens,
            **medians,
            "warm_speedup": self.warm_speedup,
            "cold_speedup": self.cold_speedup,
            "peak_bytes": self.peak_bytes,
            "extra_bytes": self.extra_bytes,
            "rounds": len(self.parts["handoff"].seconds),
            "spread": {name: timing.to_json() for name, timing in self.parts.items()},
        }


def bench_pair(
    cmap: CacheMap,
    source: LoadedModel,
    target: LoadedModel,
    contexts: list[int],
    options: BenchOptions,
    machine: Machine,
    progress: Callable[[str, int, int], None] = lambda step, done, total: None,
) -> list[Context]:
    """Measure a map at some lengths of context."""
    clock = Clock(target.device, options.cpu_time)
    warm_up = random_tokens((source, target), WARM_UP_TOKENS, options.seed)
    _round(cmap, source, target, warm_up, clock)
    measured = []
    for done, tokens in enumerate(contexts):
        measured.append(_bench_context(cmap, source, target, tokens, options, machine))
        progress(f"{source.signature.name} to {target.signature.name}", done + 1, len(contexts))
    return measured


def _bench_context(cmap, source, target, tokens, options, machine) -> Context:
    token_ids = random_tokens((source, target), tokens, options.seed)
    clock = Clock(target.device, options.cpu_time)
    run = partial(_round, cmap, source, target, token_ids, clock)
    parts = timings(run, options.budget, options.repeats)
    cache, _ = prefill(source, token_ids)
    made: list[KVCache] = []
    peak = peak_bytes(
        lambda: made.append(handoff(cmap, target, cache, token_ids).cache), target.device
    )
    cost = map_cost(cmap, _mapped_tokens(cmap, tokens), target.dtype.itemsize)
    record = {
        "source": source.signature.name,
        "target": target.signature.name,
        **cost.shares(parts["map"].median, machine),
    }
    return Context(tokens, parts, peak, peak - made[0].bytes, record)


def _mapped_tokens(cmap: CacheMap, tokens: int) -> int:
    """Return how many tokens of a context are mapped: the native head too, which is replaced."""
    rest = tokens - cmap.options.tail_length(tokens)
    return rest if rest > cmap.options.native_head else 0


def random_tokens(readers: Sequence[LoadedModel], tokens: int, seed: int) -> torch.Tensor:
    """Return random tokens [1, T] that all read: what they say does not change what they cost."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = min(loaded.signature.geometry.vocabulary for loaded in readers)
    return torch.randint(vocabulary, (1, tokens), generator=generator).to(readers[0].device)


def _round(
    cmap: CacheMap, source: LoadedModel, target: LoadedModel, token_ids: torch.Tensor, clock: Clock
) -> Round:
    (cache, _), source_seconds = clock.timed(lambda: prefill(source, token_ids))
    done, seconds = clock.timed(partial(handoff, cmap, target, cache, token_ids))
    # The handoff tells its own parts on the wall's clock: what counts is their share of it.
    unit = seconds / sum(done.seconds.values())
    mapped, build = (unit * done.seconds.get(part, 0.0) for part in ("map", "build"))
    # Memory must not differ between what is compared.
    del cache, done
    _, target_seconds = clock.timed(lambda: prefill(target, token_ids))
    return {
        "source_prefill": source_seconds,
        "map": mapped,
        "build": build,
        "first_token": seconds - mapped - build,
        "handoff": seconds,
        "target_prefill": target_seconds,
    }
