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
from kvmap.columns import KINDS
from kvmap.evaluate.items import Ids, tensor
from kvmap.handoff import handoff, map_middle, tail_length
from kvmap.mapping import Affine, CacheMap
from kvmap.models import LoadedModel, prefill
from kvmap.rope import strip


@dataclass(frozen=True, eq=False)
class Pair:
    """A map, its two models, and the maps that serve as controls."""

    cmap: CacheMap
    source: LoadedModel
    target: LoadedModel
    random: CacheMap
    zero: CacheMap


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
    tail = tail_length(pair.cmap.options.native_tail, tokens)
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
        if applies(name, pair.cmap):
            reader = pair.source if ARMS[name].reader == "source" else pair.target
            yield name, reader, ARMS[name].make(pair, reading) if reading else None


def applies(name: str, cmap: CacheMap) -> bool:
    """Say whether an arm can exist for a pair: a raw copy needs equal heads of equal size."""
    source, target = cmap.source.geometry, cmap.target.geometry
    same = (source.kv_heads, source.head_size) == (target.kv_heads, target.head_size)
    return name != "raw_copy" or same


def random_map(cmap: CacheMap, seed: int) -> CacheMap:
    """Return a map whose weights have the same singular values in random directions.

    Inputs are shuffled with random signs, outputs turned by a random orthogonal matrix: both
    leave singular values alone and cost far less than a decomposition. Biases are kept.
    """
    generator = torch.Generator().manual_seed(seed)
    return cmap.each(lambda _, part: _scramble(part, generator))


def _scramble(part: Affine, generator: torch.Generator) -> Affine:
    groups, p, _ = part.weight.shape
    q = part.bias.shape[-1]
    order = torch.stack([torch.randperm(p, generator=generator) for _ in range(groups)])
    signs = torch.randint(0, 2, (groups, p, 1), generator=generator) * 2.0 - 1.0
    turn = torch.linalg.qr(torch.randn(groups, q, q, generator=generator, dtype=torch.float64)).Q

    def shuffled(weight: Tensor) -> Tensor:
        rows = order.to(weight.device)[:, :, None].expand_as(weight)
        return weight.gather(1, rows) * signs.to(weight)

    turned = _after(_before(part, shuffled), lambda weight: weight @ turn.to(weight))
    return replace(turned, bias=part.bias)


def _before(part: Affine, change: Callable[[Tensor], Tensor]) -> Affine:
    """Return a part whose weights on the inputs are changed: [G, p, *]."""
    network = part.network
    if network:
        network = (replace(network[0], weight=change(network[0].weight)), *network[1:])
    return replace(part, weight=change(part.weight), network=network)


def _after(part: Affine, change: Callable[[Tensor], Tensor]) -> Affine:
    """Return a part followed by a linear map of its outputs: tensors [G, *, q]."""
    biased = lambda step: change(step.bias[:, None])[:, 0]  # noqa: E731
    network = part.network
    if network:
        last = replace(network[-1], weight=change(network[-1].weight), bias=biased(network[-1]))
        network = (*network[:-1], last)
    factor = "weight" if part.up is None else "up"
    changed = {factor: change(getattr(part, factor))}
    return replace(part, bias=biased(part), network=network, **changed)


def match_moments(cmap: CacheMap, other: CacheMap, target: LoadedModel, cache: KVCache) -> CacheMap:
    """Return `other` with the mean of each output, and the variance over all, that `cmap` has."""
    wanted, found = (_output_moments(m, target, cache) for m in (cmap, other))

    def matched(at: tuple[int, str], part: Affine) -> Affine:
        (mean, spread), (other_mean, other_spread) = wanted[at], found[at]
        scale = spread / other_spread.clamp_min(1e-12)
        shift = (mean - scale * other_mean).reshape(part.bias.shape)
        scaled = _after(part, lambda tensor: tensor * scale)
        return replace(scaled, bias=scaled.bias + shift)

    return other.each(matched)


def _output_moments(
    cmap: CacheMap, target: LoadedModel, cache: KVCache
) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    """Return by (layer, kind) the mean [H, D] and the standard deviation over all channels."""
    made = map_middle(cmap, target, cache)
    moments = {}
    for layer, table in enumerate(cmap.target.geometry.rope):
        content = {"key": strip(made.keys[layer], made.positions, table)}
        content["value"] = made.values[layer].float()
        for kind in KINDS:
            rows = content[kind].transpose(1, 2).flatten(0, 1)  # [T, H, D]
            spread = rows.var(0, correction=0).mean().sqrt()
            moments[layer, kind] = rows.mean(0), spread
    return moments
