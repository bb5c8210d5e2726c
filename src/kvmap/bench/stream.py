"""Time what a streaming session leaves to do once the source has read its last token."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from kvmap.bench.clock import Clock, Round, timings
from kvmap.bench.pair import BenchOptions, random_tokens
from kvmap.handoff import handoff
from kvmap.mapping import CacheMap
from kvmap.models import LoadedModel, prefill
from kvmap.streaming import StreamingMap

CHUNK = 64


def bench_stream(
    cmap: CacheMap,
    source: LoadedModel,
    target: LoadedModel,
    contexts: list[int],
    options: BenchOptions,
) -> list[dict[str, Any]]:
    """Measure sessions that map chunks of 64 tokens, beside a handoff in one go.

    Returns:
        By context the medians of "chunk", "last_chunk", "tail" (the target's own pass over the
        last tokens), "left" (the last two) and "whole", in seconds.
    """
    clock = Clock(target.device, options.cpu_time)
    rows = []
    for tokens in contexts:
        ids = random_tokens((source, target), tokens, options.seed)
        cache, _ = prefill(source, ids)

        def one_round(ids: torch.Tensor = ids, cache: Any = cache) -> Round:
            return _round(cmap, target, cache, ids, clock)

        parts = timings(one_round, options.budget, options.repeats)
        rows.append(
            {
                "source": source.signature.name,
                "target": target.signature.name,
                "tokens": tokens,
                "chunk_tokens": CHUNK,
                **{f"{name}_seconds": timing.median for name, timing in parts.items()},
                "last_over_chunk": parts["last_chunk"].median / parts["chunk"].median,
                "rounds": len(parts["whole"].seconds),
                "spread": {name: timing.to_json() for name, timing in parts.items()},
            }
        )
    return rows


def _round(cmap: CacheMap, target: LoadedModel, cache: Any, ids: torch.Tensor, clock: Clock):
    session = StreamingMap(cmap, target, capacity=cache.tokens)
    chunks = []
    for start in range(0, cache.tokens, CHUNK):
        chunk = cache.slice(start, min(start + CHUNK, cache.tokens))
        chunks.append(clock.timed(lambda c=chunk: session.append(c))[1])
    _, tail = clock.timed(session.handoff)
    _, whole = clock.timed(lambda: handoff(session.cmap, target, cache, ids))
    return {
        "chunk": median(chunks),
        "last_chunk": chunks[-1],
        "tail": tail,
        "left": chunks[-1] + tail,
        "whole": whole,
    }
