"""Where a mapped cache is wrong: by layer and head, with the target's own queries.

For the last W queries of a document and each layer, attention is computed over the target's
own cache and over the mapped one: W x T, never T x T. Reported per layer and head:

cosine              of the two attention outputs, mean over queries
key_concentration   key error along the right singular vectors v_i of the queries, weighted by
                    s_i², over its plain mean: above 1 the error lies where queries look
                    (arXiv 2608.03893, section 4.5)
value_concentration value error weighted by squared attention, over its plain mean
first_mass          attention that the first tokens draw
first_error         relative error of the first tokens' keys and values
r2                  of content keys and values on these documents

Queries are the native run's, so each layer is judged by itself, not by what came before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap import metrics
from kvmap.cache import KVCache
from kvmap.evaluate.arms import ARMS, Pair, Reading, read
from kvmap.evaluate.items import Ids, tensor
from kvmap.models.attention import last_queries
from kvmap.rope import strip

WINDOW = 64
FIRST_TOKENS = 4
DOCUMENTS = 8


@dataclass(frozen=True, eq=False)
class Diagnostics:
    """Means over documents, fp32.

    Attributes:
        cosine: [L, Hq]; first_mass alike.
        key_concentration: [L, H]; value_concentration, key_r2 and value_r2 alike.
        first_error: [L, 2], keys and values.
        document_cosine: [N], each document's mean over mapped layers.
        mapped: Layers that are mapped; exact ones would flatter every mean.
    """

    cosine: Tensor
    key_concentration: Tensor
    value_concentration: Tensor
    first_mass: Tensor
    first_error: Tensor
    key_r2: Tensor
    value_r2: Tensor
    document_cosine: Tensor
    mapped: tuple[int, ...]

    @property
    def worst_layer(self) -> int:
        """Layer whose attention outputs are furthest off, mean over its heads."""
        return int(self.cosine.mean(1).argmin())

    @property
    def worst_head(self) -> tuple[int, int]:
        """Layer and query head that are furthest off."""
        return divmod(int(self.cosine.argmin()), self.cosine.shape[1])


def diagnose(pair: Pair, contexts: Sequence[Ids]) -> Diagnostics:
    """Return diagnostics over documents, each of at least two tokens."""
    parts, sums = [], _Sums()
    for context in contexts:
        reading = read(pair, context, context)
        mapped = ARMS["mapped"].make(pair, reading)
        queries, scaling = last_queries(pair.target, tensor(context), WINDOW)
        parts.append(_document(reading.native, mapped, queries, scaling))
        sums.add(pair, reading, mapped)
    mean = {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
    layers = [index for index, layer in enumerate(pair.cmap.layers) if layer is not None]
    documents = torch.stack([part["cosine"][layers].mean() for part in parts])
    return Diagnostics(**mean, **sums.r2(), document_cosine=documents, mapped=tuple(layers))


def _document(
    native: KVCache, mapped: KVCache, queries: list[Tensor], scaling: float
) -> dict[str, Tensor]:
    layers = [
        _layer(queries[i][0].float(), _entries(native, i), _entries(mapped, i), scaling)
        for i in range(native.layers)
    ]
    return {name: torch.stack([layer[name] for layer in layers]).cpu() for name in layers[0]}


def _entries(cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
    return cache.keys[layer][0].float(), cache.values[layer][0].float()


def _layer(
    queries: Tensor, own: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], scaling: float
) -> dict[str, Tensor]:
    """Compare one layer's entries [H, T, D] under queries [Hq, W, D]."""
    wanted, weights = attend(queries, *own, scaling)
    found, _ = attend(queries, *other, scaling)
    key_error, value_error = other[0] - own[0], other[1] - own[1]
    first = slice(0, FIRST_TOKENS)
    relative = [
        error[:, first].norm() / part[:, first].norm().clamp_min(1e-12)
        for error, part in zip((key_error, value_error), own, strict=True)
    ]
    return {
        "cosine": metrics.cosine(wanted, found).mean(1),
        "key_concentration": key_concentration(queries, key_error),
        "value_concentration": value_concentration(weights, value_error),
        "first_mass": weights[..., first].sum(-1).mean(1),
        "first_error": torch.stack(relative),
    }


def attend(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return attention outputs [Hq, W, D] and weights [Hq, W, T] of the last W of T tokens."""
    heads, window, size = queries.shape
    tokens = keys.shape[1]
    grouped = queries.reshape(len(keys), -1, window, size)  # [H, Hq / H, W, D]
    logits = grouped @ keys[:, None].mT * scaling
    reach = torch.arange(tokens - window, tokens, device=keys.device)[:, None]
    future = torch.arange(tokens, device=keys.device) > reach
    weights = logits.masked_fill(future, -torch.inf).softmax(-1)
    output = weights @ values[:, None]
    return output.reshape(heads, window, size), weights.reshape(heads, window, tokens)


def key_concentration(queries: Tensor, error: Tensor) -> Tensor:
    """Return [H] of queries [Hq, W, D] and key errors [H, T, D]; 1 is evenly spread or no error."""
    heads = len(error)
    rows = queries.reshape(heads, -1, queries.shape[-1])
    # s_i² and v_i are the eigenpairs of QᵀQ.
    weights, directions = torch.linalg.eigh((rows.mT @ rows).double())
    along = (error.double() @ directions).square().mean(1)  # [H, D]
    weighted = (weights.clamp_min(0) * along).sum(1) / weights.clamp_min(0).sum(1).clamp_min(1e-30)
    return _over_mean(weighted, along.mean(1))


def value_concentration(weights: Tensor, error: Tensor) -> Tensor:
    """Return [H] of attention weights [Hq, W, T] and value errors [H, T, D]."""
    read = weights.reshape(len(error), -1, weights.shape[-1]).square().sum(1).double()  # [H, T]
    size = error.double().square().sum(-1)
    weighted = (read * size).sum(1) / read.sum(1).clamp_min(1e-30)
    return _over_mean(weighted, size.mean(1))


def _over_mean(weighted: Tensor, mean: Tensor) -> Tensor:
    return torch.where(mean > 1e-20, weighted / mean.clamp_min(1e-30), 1.0).float()


class _Sums:
    """Sums of squares over documents, for R² of what was mapped, by layer and head."""

    def __init__(self) -> None:
        self.kinds: dict[str, dict[str, Tensor]] = {"key": {}, "value": {}}
        self.rows = 0

    def add(self, pair: Pair, reading: Reading, mapped: KVCache) -> None:
        """Add a document's middle: neither its native head nor its native tail."""
        tokens = reading.native.tokens
        stop = tokens - pair.cmap.options.tail_length(tokens)
        start = min(pair.cmap.options.native_head, stop)
        self.rows += stop - start
        own, made = reading.native.slice(start, stop), mapped.slice(start, stop)
        tables = pair.cmap.target.geometry.rope
        keys = [
            [strip(k, own.positions, t) for k, t in zip(cache.keys, tables, strict=True)]
            for cache in (own, made)
        ]
        self._add("key", *keys)
        self._add("value", own.values, made.values)

    def _add(self, kind: str, own: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        for layer, (wanted, found) in enumerate(zip(own, made, strict=True)):
            wanted, found = wanted[0].double().cpu(), found[0].double().cpu()  # [H, T, D]
            parts = (wanted.sum(1), wanted.square().sum(1), (found - wanted).square().sum((1, 2)))
            for name, part in zip(("sum", "square", "residual"), parts, strict=True):
                key = f"{layer}.{name}"
                self.kinds[kind][key] = self.kinds[kind].get(key, 0) + part

    def r2(self) -> dict[str, Tensor]:
        """Return key_r2 and value_r2 [L, H]."""
        layers = len(self.kinds["key"]) // 3
        made = {}
        for kind, sums in self.kinds.items():
            rows = []
            for layer in range(layers):
                square, total = sums[f"{layer}.square"], sums[f"{layer}.sum"]
                spread = (square - total.square() / max(self.rows, 1)).sum(-1)
                rows.append(metrics.r2_from_sums(sums[f"{layer}.residual"], spread))
            made[f"{kind}_r2"] = torch.stack(rows).float()
        return made
