"""Hand a context from one model to another: exact head, mapped middle, native tail.

The first tokens depend on themselves alone, are outliers, and cost the target next to
nothing: it prefills them. The middle is mapped. The last tokens run on the target over the
mapped cache, since a cache alone gives no logits; a longer tail repairs what was lost.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.cache import KVCache
from kvmap.engine import allocate, empty_cache
from kvmap.errors import UsageError
from kvmap.mapping import CacheMap
from kvmap.models import LoadedModel, lowest_layers, prefill


@dataclass(frozen=True)
class Handoff:
    """The target's cache of a whole context and its next-token logits.

    Attributes:
        cache: [B, H_t, T, D_t] per layer, all T tokens of the context.
        logits: [B, vocabulary] after the last token.
        outcome: "applied", or "fallback_reprefill" where nothing was left to map.
        seconds: By part: "head", "first_layer", "map", "build", "tail".
    """

    cache: KVCache
    logits: Tensor
    outcome: str
    seconds: dict[str, float]


def check_pair(cmap: CacheMap, source: LoadedModel | None, target: LoadedModel | None) -> None:
    """Check that models are those a map was fitted for, by digest.

    Raises:
        UsageError: One is another model.
    """
    for side, expected, loaded in (
        ("source", cmap.source, source),
        ("target", cmap.target, target),
    ):
        if loaded is not None and loaded.signature.digest != expected.digest:
            raise UsageError(
                f"the map's {side} is {expected.name} (digest {expected.digest[:12]}), found "
                f"{loaded.signature.name} (digest {loaded.signature.digest[:12]}); "
                "fit a map for this pair"
            )


def handoff(
    cmap: CacheMap, target: LoadedModel, source_cache: KVCache, token_ids: Tensor
) -> Handoff:
    """Return the target's cache of tokens [B, T] that the source has read.

    Args:
        source_cache: The source's, of at least the first T - tail tokens.

    Raises:
        UsageError: The source's cache holds other tokens, or too few.
    """
    tokens = token_ids.shape[1]
    tail = cmap.options.tail_length(tokens)
    head = min(cmap.options.native_head, tokens - tail)
    if head:
        _check_head(source_cache)
    middle = _middle(source_cache, token_ids, head, tokens - tail)
    clock = LapClock(target.device)
    token_ids = token_ids.to(target.device)
    shape, places = target.signature.geometry, target.places
    room = empty_cache(shape, torch.zeros_like(token_ids), target.dtype, places)
    clock.lap("build")
    past = None
    if head:
        past, _ = prefill(target, token_ids[:, :head], room=room)
        clock.lap("head")
    if middle is not None:
        before = source_cache.slice(0, head) if head else None
        map_middle(cmap, target, middle, clock, room.slice(head, tokens - tail), past, before)
        past = _past(room, source_cache, token_ids, tokens - tail)
    cache, logits = prefill(target, token_ids[:, tokens - tail :], past=past, room=room)
    clock.lap("tail")
    return Handoff(
        cache,
        logits[:, -1],
        "applied" if middle is not None else "fallback_reprefill",
        clock.seconds,
    )


def map_middle(
    cmap: CacheMap,
    target: LoadedModel,
    middle: KVCache,
    clock: LapClock | None = None,
    out: KVCache | None = None,
    past: KVCache | None = None,
    before: KVCache | None = None,
) -> KVCache:
    """Map part of a source's cache, with the target's own lowest layers where the map reads them.

    Args:
        out: Written and returned instead of a new cache.
        past: The target's cache of what comes before, which its lowest layers attend to.
        before: The source's cache of what comes before, or its last tokens.
    """
    clock = clock or LapClock(target.device)
    first = None
    if cmap.needs_target:
        count = cmap.options.read_layers
        first = lowest_layers(target, middle.token_ids, middle.positions, count, past, middle.mask)
        clock.lap("first_layer")
    middle = middle.to(target.device)
    out = out or allocate(cmap.target.geometry, middle, target.dtype)
    if before is not None:
        before = before.slice(max(0, before.tokens - cmap.options.lookback), before.tokens)
        before = before.to(target.device) if before.tokens else None
    mapped = cmap.apply(middle, first, out, before)
    clock.lap("map")
    return mapped


def _past(room: KVCache, source_cache: KVCache, token_ids: Tensor, stop: int) -> KVCache:
    """Return what the room holds before the tail, at the source's positions."""
    place = lambda tensor: None if tensor is None else tensor[:, :stop].to(token_ids.device)  # noqa: E731
    filled = room.slice(0, stop)
    places = place(source_cache.positions), token_ids[:, :stop], place(source_cache.mask)
    return KVCache(filled.keys, filled.values, *places)


def _check_head(source_cache: KVCache) -> None:
    """Check that the target can prefill the first tokens: they are text and stand at 0."""
    start = int(source_cache.positions[:, 0].max())
    padded = source_cache.mask is not None and not bool(source_cache.mask.all())
    if padded or start:
        found = "is padded" if padded else f"begins at position {start}"
        raise UsageError(
            f"the source's cache {found}, but this map has the target prefill the first tokens; "
            "hand over unpadded contexts from position 0, or fit with `--native-head 0`"
        )


def _middle(source_cache: KVCache, token_ids: Tensor, head: int, stop: int) -> KVCache | None:
    if source_cache.tokens < stop:
        raise UsageError(
            f"the source's cache has {source_cache.tokens} tokens, expected at least {stop}"
        )
    known = source_cache.token_ids
    if known is not None and not torch.equal(known[:, :stop].cpu(), token_ids[:, :stop].cpu()):
        raise UsageError(
            "the source's cache was made from other tokens than this context; "
            "prefill the source again"
        )
    if stop <= head:
        return None
    middle = source_cache.slice(head, stop)
    return KVCache(
        middle.keys, middle.values, middle.positions, token_ids[:, head:stop], middle.mask
    )


class LapClock:
    """Laps in seconds; waits for the device, so that each lap is its own work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}
        self.last = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def lap(self, name: str) -> None:
        now = self._now()
        self.seconds[name] = now - self.last
        self.last = now
