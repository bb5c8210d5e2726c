"""Who answers, and from what: the mapped cache and everything it could be mistaken for.

Every arm that stands beside the mapped cache keeps what the target computed itself (native
head, exact layers, native tail) and differs in the mapped part alone. So the margin over a
control is what the mapped part brought. The arms:

native          the target's own prefill
source          the source answers from its own cache
mapped          the handoff under test
raw_copy        the source's entries of nearest depth, as they are; None where shapes differ
random_map      a map of the same spectrum and output moments that knows nothing
wrong_document  the map, given another document's cache of the same length
zero            zeros where the map would write
no_context      the target sees the question alone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvmap.cache import KVCache, concat
from kvmap.evaluate.controls import match_moments, random_map
from kvmap.evaluate.items import Ids, tensor
from kvmap.handoff import handoff
from kvmap.mapping import CacheMap
from kvmap.models import LoadedModel, prefill


@dataclass(frozen=True, eq=False)
class Pair:
    """A map, its two models, the maps that serve as controls, and perhaps the map back."""

    cmap: CacheMap
    source: LoadedModel
    target: LoadedModel
    random: CacheMap
    zero: CacheMap
    back: CacheMap | None = None


@dataclass(frozen=True, eq=False)
class Reading:
    """A context as both models read it: made once, shared by all arms and questions.

    `wrong` is the source's cache of another document of the same length.
    """

    token_ids: Tensor
    source: KVCache
    native: KVCache
    wrong: KVCache


def read(pair: Pair, context: Ids, wrong: Ids) -> Reading:
    """Prefill a context on both models, and the wrong document on the source."""
    ids = tensor(context)
    return Reading(
        ids,
        source=prefill(pair.source, ids)[0],
        native=prefill(pair.target, ids)[0],
        wrong=prefill(pair.source, tensor(wrong))[0],
    )


def make_pair(
    cmap: CacheMap, source: LoadedModel, target: LoadedModel, sample: Ids, seed: int = 0
) -> Pair:
    """Return a pair with its control maps; `sample` is text to match output moments on."""
    cmap = cmap.to(target.device)
    cache = prefill(source, tensor(sample))[0].to(target.device)
    random = match_moments(cmap, random_map(cmap, seed), target, cache)
    zero = cmap.each(lambda _, part: part.each(torch.zeros_like))
    return Pair(cmap, source, target, random, zero)


def _native(pair: Pair, reading: Reading) -> KVCache:
    return reading.native


def _source(pair: Pair, reading: Reading) -> KVCache:
    return reading.source


def _mapped(pair: Pair, reading: Reading) -> KVCache:
    return handoff(pair.cmap, pair.target, reading.source, reading.token_ids).cache


def _random_map(pair: Pair, reading: Reading) -> KVCache:
    return handoff(pair.random, pair.target, reading.source, reading.token_ids).cache


def _wrong_document(pair: Pair, reading: Reading) -> KVCache:
    unsigned = replace(reading.wrong, token_ids=None)
    return handoff(pair.cmap, pair.target, unsigned, reading.token_ids).cache


def _zero(pair: Pair, reading: Reading) -> KVCache:
    return handoff(pair.zero, pair.target, reading.source, reading.token_ids).cache


def _no_context(pair: Pair, reading: Reading) -> None:
    return None


def _raw_copy(pair: Pair, reading: Reading) -> KVCache:
    """Copy the source's layer of nearest depth; layers the map leaves exact stay so."""
    depth = len(pair.cmap.layers)
    last = reading.source.layers - 1
    near = [round(layer * last / max(depth - 1, 1)) for layer in range(depth)]
    exact = [layer is None for layer in pair.cmap.layers]
    source = reading.source.to(pair.target.device, pair.target.dtype)
    pick = lambda own, other: tuple(  # noqa: E731
        own[i] if exact[i] else other[near[i]] for i in range(depth)
    )
    native = reading.native
    keys, values = pick(native.keys, source.keys), pick(native.values, source.values)
    return around(pair, reading, replace(native, keys=keys, values=values))


def around(pair: Pair, reading: Reading, entries: KVCache) -> KVCache:
    """Return entries for the whole context with the head and tail of a handoff made native."""
    tokens = reading.token_ids.shape[1]
    tail = pair.cmap.options.tail_length(tokens)
    head = min(pair.cmap.options.native_head, tokens - tail)
    middle = entries.slice(head, tokens - tail)
    past = concat(reading.native.slice(0, head), middle) if head else middle
    if past.tokens == 0:
        return reading.native
    return prefill(pair.target, reading.token_ids[:, tokens - tail :], past=past)[0]


@dataclass(frozen=True)
class Arm:
    """Which model answers, and the cache it is given (None for no context)."""

    reader: str
    make: Callable[[Pair, Reading], KVCache | None]


ARMS: dict[str, Arm] = {
    "native": Arm("target", _native),
    "source": Arm("source", _source),
    "mapped": Arm("target", _mapped),
    "raw_copy": Arm("target", _raw_copy),
    "random_map": Arm("target", _random_map),
    "wrong_document": Arm("target", _wrong_document),
    "zero": Arm("target", _zero),
    "no_context": Arm("target", _no_context),
}
CONTROLS = ("raw_copy", "random_map", "wrong_document", "zero", "no_context")


def caches(
    pair: Pair, context: Ids, wrong: Ids, names: Sequence[str] = tuple(ARMS)
) -> Iterator[tuple[str, LoadedModel, KVCache | None]]:
    """Yield each arm that can exist: its name, who answers, and the cache to answer from.

    With an empty context there is nothing to map: all arms of a reader are alike.
    """
    reading = read(pair, context, wrong) if context else None
    for name in names:
        if name in ARMS and applies(name, pair.cmap):
            reader = pair.source if ARMS[name].reader == "source" else pair.target
            yield name, reader, ARMS[name].make(pair, reading) if reading else None


def applies(name: str, cmap: CacheMap) -> bool:
    """Say whether an arm can exist for a pair: a raw copy needs equal heads of equal size."""
    source, target = cmap.source.geometry, cmap.target.geometry
    same = (source.kv_heads, source.head_size) == (target.kv_heads, target.head_size)
    return name != "raw_copy" or same
