"""What the target says after a mapped context, differentiable in the map's weights.

A lesson is a batch of sequences cut at a token: the source has read the context, the target
has read everything natively. The mapped cache replaces the target's own between the native
head and the cut; the target, frozen, then reads on. Only that continuation is on the tape,
with the keys and values that its attention reads. The loss is

    KL(native ‖ mapped) per token + ρ·mean over layers and kinds of ‖ŷ - y‖² / ‖y - ȳ‖².
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap import metrics
from kvmap.cache import KVCache, batched, concat
from kvmap.columns import KINDS
from kvmap.engine.trail import Trail
from kvmap.mapping import CacheMap, LayerMap
from kvmap.models import LoadedModel, prefill
from kvmap.rope import rotate_with_gradient, strip

# Of caches of calibration sequences that a polish keeps.
KEPT_BYTES = 4 << 30


@dataclass(frozen=True, eq=False)
class Lesson:
    """A batch of contexts, what follows them, and what the target itself makes of both.

    Attributes:
        source: The source's cache of the tokens to map.
        before: The source's cache of the head; None where there is none.
        native: The target's own cache of the head and the tokens to map.
        head: Tokens of the native head.
        tail: Tokens of the native tail.
        token_ids: [B, tail + Q]: the tail of the context and the continuation.
        logits: [B, Q + 1, V], the target's own from the last token of the context on.
    """

    source: KVCache
    before: KVCache | None
    native: KVCache
    head: int
    tail: int
    token_ids: Tensor
    logits: Tensor


def lesson(
    models: tuple[LoadedModel, LoadedModel],
    token_ids: Tensor,
    continuation: int,
    head: int,
    tail: int = 1,
) -> Lesson:
    """Let both models read sequences [B, T] whose last `continuation` tokens are to predict.

    Args:
        head: Tokens of the native head, where the context has as many.
        tail: Tokens of the native tail.
    """
    return Readings(models, token_ids).lesson(
        torch.arange(len(token_ids)), token_ids.shape[1], continuation, head, tail
    )


class Readings:
    """What both models made of sequences, each read once and kept while there is room.

    A cache of a sequence begins with the cache of any of its beginnings, so one reading serves
    every cut of it.
    """

    def __init__(
        self, models: tuple[LoadedModel, LoadedModel], token_ids: Tensor, room: int = KEPT_BYTES
    ) -> None:
        """Take sequences [N, T] and the bytes that may be kept of their caches."""
        self.models, self.token_ids, self.room = models, token_ids, room
        self.kept: OrderedDict[int, tuple[KVCache, KVCache]] = OrderedDict()

    def lesson(
        self, chosen: Tensor, stop: int, continuation: int, head: int, tail: int = 1
    ) -> Lesson:
        """Make a lesson of the first `stop` tokens of some sequences, by number."""
        cut = stop - continuation - tail
        head = min(head, cut - 1)
        source, native = (
            batched([cache.slice(0, cut) for cache in caches])
            for caches in zip(*map(self._read, chosen.tolist()), strict=True)
        )
        after = self.token_ids[chosen, cut:stop]
        target = self.models[1]
        _, logits = prefill(target, after, past=native, keep_logits=continuation + 1)
        source = source.to(target.device, torch.float32)
        before = source.slice(0, head) if head else None
        mapped = source.slice(head, cut)
        return Lesson(mapped, before, native, head, tail, after, logits.float())

    def _read(self, at: int) -> tuple[KVCache, KVCache]:
        """Return both models' caches of one sequence; forget those used longest ago."""
        if at in self.kept:
            self.kept.move_to_end(at)
            return self.kept[at]
        read = tuple(prefill(model, self.token_ids[at : at + 1])[0] for model in self.models)
        each = sum(cache.bytes for cache in read)
        while self.kept and (len(self.kept) + 1) * each > self.room:
            self.kept.popitem(last=False)
        self.kept[at] = read
        return read


def loss(
    cmap: CacheMap, target: LoadedModel, given: Lesson, reconstruction: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the loss and its KL(native ‖ mapped), nats per token of the continuation."""
    own = given.native.slice(given.head, given.native.tokens)
    mapped = map_with_gradient(cmap, given.source, own, given.before)
    past = concat(given.native.slice(0, given.head), mapped) if given.head else mapped
    past = past.to(dtype=target.dtype)
    asked = given.logits.shape[1]
    # Not the cache that it returns: on the tape are the copies that attention made of it.
    logits = prefill(target, given.token_ids, past=past, keep_logits=asked, gradient=True)[1]
    divergence = metrics.kl_divergence(given.logits, logits.float()).mean()
    if not reconstruction:
        return divergence, divergence
    return divergence + reconstruction * relative_error(cmap, mapped, own), divergence


def map_with_gradient(
    cmap: CacheMap, source: KVCache, own: KVCache, before: KVCache | None = None
) -> KVCache:
    """Return what `cmap.apply` does, made of operations that autograd can follow.

    Args:
        own: The target's own cache of the same tokens; its exact layers and anchor are used.
        before: The source's cache of the tokens before; None where the context begins.
    """
    tables = cmap.target.geometry.rope
    entries = {}
    for at in cmap.source_layers:
        content = strip(source.keys[at], source.positions, cmap.source.geometry.rope[at])
        pair = (content, source.values[at].float())
        entries[at] = {kind: _laid(cmap, one) for kind, one in zip(KINDS, pair, strict=True)}
    others = []
    if cmap.options.anchor:
        anchors = (strip(own.keys[0], own.positions, tables[0]), own.values[0].float())
        others = [_laid(cmap, tensor, of_target=True) for tensor in anchors]
    trail = Trail.of(source, 0, source.tokens, cmap.options, before)
    late = list(trail.content(cmap.source.geometry))
    others += [
        _laid(cmap, trail.late(tensor.float(), tokens))
        for tokens in range(1, cmap.options.lookback + 1)
        for pair in late
        for tensor in pair
    ]
    keys, values = list(own.keys), list(own.values)
    places = [key.device for key in keys]
    for at, layer in enumerate(cmap.layers):
        if layer is not None:
            key, value = (_predict(cmap, layer, kind, entries, others) for kind in KINDS)
            keys[at], values[at] = rotate_with_gradient(key, own.positions, tables[at]), value
    made = KVCache(tuple(keys), tuple(values), own.positions, own.token_ids, own.mask)
    return made.placed(places)


def _laid(cmap: CacheMap, tensor: Tensor, of_target: bool = False) -> Tensor:
    """Return entries [B, H, T, D] as a part of the inputs: [B, 1, T, H·D], or [B, H_t, T, D]."""
    if cmap.options.heads == "matched":
        return tensor if of_target else tensor[:, list(cmap.options.assignment)]
    return tensor.transpose(1, 2).flatten(2)[:, None]


def _predict(
    cmap: CacheMap,
    layer: LayerMap,
    kind: str,
    entries: dict[int, dict[str, Tensor]],
    others: list[Tensor],
) -> Tensor:
    """Return one layer's content keys or values [B, H_t, T, D_t]."""
    kinds = KINDS if cmap.options.joint else (kind,)
    inputs = [entries[at][part] for at in layer.source_layers for part in kinds]
    made = layer.of(kind)(*inputs, *others)
    if cmap.options.heads == "matched":
        return made
    return made[:, 0].unflatten(-1, (cmap.target.geometry.kv_heads, -1)).transpose(1, 2)


def relative_error(cmap: CacheMap, mapped: KVCache, own: KVCache) -> Tensor:
    """Return ‖ŷ - y‖² / ‖y - ȳ‖², mean over mapped layers and over keys and values."""
    errors = []
    for at, layer in enumerate(cmap.layers):
        for found, wanted in ((mapped.keys, own.keys), (mapped.values, own.values)):
            if layer is not None:
                truth = wanted[at].float()
                spread = (truth - truth.mean((0, 2), keepdim=True)).square().sum()
                errors.append((found[at] - truth).square().sum() / spread.clamp_min(1e-12))
    return torch.stack([error.to(errors[0].device) for error in errors]).mean()
