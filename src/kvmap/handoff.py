"""Hand a context from one model to another: exact head, mapped middle, native tail.

The first tokens depend on themselves alone, are outliers, and cost the target next to
nothing: it prefills them. The middle is mapped. The last tokens run on the target over the
mapped cache, since a cache alone gives no logits; a longer tail repairs what was lost.

The two halves can be apart: `map_context` runs where the source and the map are and takes no more
of the target than its lowest layers, `finish` where the target is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvmap.cache import KVCache, check_shapes
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
    """Check that models are those a map was fitted for, by digest and by the shape of their caches.

    Raises:
        UsageError: One is another model, or the map's header says of it what is not so.
    """
    for side, loaded in (("source", source), ("target", target)):
        if loaded is not None:
            cmap.check_model(side, loaded.signature)


def handoff(
    cmap: CacheMap, target: LoadedModel, source_cache: KVCache, token_ids: Tensor
) -> Handoff:
    """Return the target's cache of tokens [B, T] that the source has read.

    Args:
        source_cache: The source's, of at least the first T - tail tokens.

    Raises:
        UsageError: The source's cache is not of its shape or holds other tokens, too few, or out
            of order, or the tokens are not of the target's vocabulary, or more than it reads.
    """
    clock = LapClock(target.device)
    middle = _middle(cmap, target, source_cache, token_ids)
    room = _empty(target, token_ids)
    clock.lap("build")
    mapped = map_middle(cmap, target, middle, clock, room.slice(0, middle.tokens))
    return finish(target, mapped, token_ids, cmap.options.native_head, clock, room)


def map_context(
    cmap: CacheMap,
    lowest: LoadedModel,
    source_cache: KVCache,
    token_ids: Tensor,
    clock: LapClock | None = None,
) -> KVCache:
    """Return the mapped cache [B, H_t, T - tail, D_t] of tokens [B, T]: the source's half.

    The native head is mapped too, badly, since no fit has seen it: `finish` replaces it. Where a
    context is no longer than head and tail, the cache has no tokens.

    Args:
        lowest: The target, or its lowest layers alone.
        source_cache: The source's, of at least the first T - tail tokens.

    Raises:
        UsageError: The source's cache is not of its shape or holds other tokens, too few, or out
            of order, or the tokens are not of the target's vocabulary, or more than it reads.
    """
    return map_middle(cmap, lowest, _middle(cmap, lowest, source_cache, token_ids), clock)


def _middle(
    cmap: CacheMap, lowest: LoadedModel, source_cache: KVCache, token_ids: Tensor
) -> KVCache:
    """Return what of the source's cache is to be mapped, and check all that can be before."""
    check_pair(cmap, None, lowest)
    _require_context(lowest, token_ids)
    check_shapes(source_cache, cmap.source, "the source's cache")
    tokens, head = token_ids.shape[-1], cmap.options.native_head
    stop = tokens - cmap.options.tail_length(tokens)
    if source_cache.tokens < stop:
        raise UsageError(
            f"the source's cache has {source_cache.tokens} tokens, expected at least {stop}"
        )
    _check_tokens("source's cache", source_cache, token_ids, stop, "prefill the source")
    if min(head, stop):
        _check_head("source's", source_cache)
    read = replace(source_cache.slice(0, stop), token_ids=token_ids[:, :stop].long())
    middle = read if stop > head else read.slice(0, 0)
    _check_reach(lowest, middle, tokens)
    return middle


def finish(
    target: LoadedModel,
    mapped: KVCache,
    token_ids: Tensor,
    native_head: int,
    clock: LapClock | None = None,
    room: KVCache | None = None,
) -> Handoff:
    """Run the native head, and the tail over the mapped cache: the target's half of a handoff.

    Args:
        mapped: What `map_context` has made of tokens [B, T].
        native_head: First tokens that the target prefills itself, as the map's options say.
        room: A cache of T tokens whose front is `mapped`, so that nothing is copied.

    Raises:
        UsageError: The mapped cache is not the target's or not of these tokens, or they are not of
            its vocabulary, or more than it reads.
    """
    _require_context(target, token_ids)
    check_shapes(mapped, target.signature, "the mapped cache")
    stop = mapped.tokens
    if stop >= token_ids.shape[-1]:
        raise UsageError(
            f"the mapped cache has {stop} tokens, expected fewer than the context's "
            f"{token_ids.shape[-1]}: the target must run the last ones"
        )
    _check_tokens("mapped cache", mapped, token_ids, stop, "map the context")
    if native_head < 0 or 0 < stop <= native_head:
        raise UsageError(
            f"found a native head of {native_head} tokens, expected from 0 to fewer than the "
            f"{stop} of the mapped cache; take what `map_context`'s map has"
        )
    if min(native_head, stop):
        _check_head("mapped", mapped)
    _check_reach(target, mapped, token_ids.shape[-1])
    clock = clock or LapClock(target.device)
    token_ids = token_ids.to(target.device, torch.int64)
    if room is None:
        room = _empty(target, token_ids)
        mapped.copy_to(room)
        clock.lap("build")
    if head := min(native_head, stop):
        prefill(target, token_ids[:, :head], room=room)
        clock.lap("head")
    past = None
    if stop:
        filled = room.slice(0, stop)
        past = replace(mapped, keys=filled.keys, values=filled.values)
    cache, logits = prefill(target, token_ids[:, stop:], past=past, room=room)
    clock.lap("tail")
    outcome = "applied" if stop else "fallback_reprefill"
    return Handoff(cache, logits[:, -1], outcome, clock.seconds)


def _empty(target: LoadedModel, token_ids: Tensor) -> KVCache:
    """Return the target's cache of a context, to be filled; its positions are not set."""
    positions = torch.zeros_like(token_ids, device=target.device, dtype=torch.int64)
    return empty_cache(target.signature.geometry, positions, target.dtype, target.places)


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
        out: Written instead of a new cache.
        past: The target's cache of what comes before, which its lowest layers attend to.
        before: The source's cache of what comes before, or its last tokens.
    """
    if not middle.tokens:
        return allocate(cmap.target.geometry, middle.to(target.device), target.dtype)
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
    return replace(middle, keys=mapped.keys, values=mapped.values)


def _require_context(target: LoadedModel, token_ids: Tensor) -> None:
    """Check that there are tokens, and of the target's vocabulary."""
    target.require_tokens(token_ids)
    if not token_ids.numel():
        raise UsageError(
            f"found tokens {list(token_ids.shape)}, expected a context of one token at least"
        )


def _check_head(what: str, cache: KVCache) -> None:
    """Check that the target can prefill the first tokens: they are text and stand at 0."""
    first = cache.positions[:, 0]
    start = int(first[first.abs().argmax()])
    padded = cache.mask is not None and not bool(cache.mask.all())
    if padded or start:
        found = "is padded" if padded else f"begins at position {start}"
        raise UsageError(
            f"the {what} cache {found}, but this map has the target prefill the first tokens; "
            "hand over unpadded contexts from position 0, or fit with `--native-head 0`"
        )


def _check_tokens(what: str, cache: KVCache, token_ids: Tensor, stop: int, remedy: str) -> None:
    if token_ids.shape[0] != cache.positions.shape[0]:
        raise UsageError(
            f"found tokens {list(token_ids.shape)}, expected [{cache.positions.shape[0]}, tokens] "
            f"as of the {what}"
        )
    known, given = cache.token_ids, token_ids[:, :stop].cpu().long()
    if known is not None and not torch.equal(known[:, :stop].cpu().long(), given):
        raise UsageError(f"the {what} was made from other tokens than this context; {remedy} again")
    _check_positions(what, cache.slice(0, stop), remedy)


def _check_positions(what: str, cache: KVCache, remedy: str) -> None:
    """Check that the tokens of every row stand one behind the other; padding may stand anywhere."""
    if not cache.positions.numel():
        return
    text = torch.ones_like(cache.positions) if cache.mask is None else cache.mask.long()
    place = text.cumsum(-1) - 1
    first = (cache.positions - place).gather(1, text.argmax(-1, keepdim=True)).clamp_min(0)
    wrong = ((cache.positions != first + place) & text.bool()).nonzero()
    if len(wrong):
        row, token = wrong[0].tolist()
        raise UsageError(
            f"the {what} has token {token} at position {int(cache.positions[row, token])}, "
            f"expected {int((first + place)[row, token])}: one by one, from 0 or later; "
            f"{remedy} again"
        )


def _check_reach(target: LoadedModel, begun: KVCache, tokens: int) -> None:
    """Check that the target reads as far as a context of so many tokens, begun thus, goes."""
    end = int(begun.positions[:, -1].max()) + 1 if begun.tokens else 0
    target.require_positions(end + tokens - begun.tokens)


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
