"""One layer of each model of a pair, a share of a map, and their times for those of the whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from kvmap.bench.clock import Clock
from kvmap.bench.costs import factors
from kvmap.bench.shapes import Share, config_of, deepened, fast_dtype, random_model, share_map
from kvmap.cache import KVCache
from kvmap.engine import prepare
from kvmap.fit import Recipe
from kvmap.mapping import CacheMap
from kvmap.models import LoadedModel, prefill

# Rows of a product whose throughput counts as the best there is.
PRODUCT_TOKENS = 512


@dataclass(frozen=True)
class Pair:
    """One layer of source and target, and what they stand for.

    Attributes:
        depths: Numbers of layers of the whole models.
        cmap: The share of the map, ready to apply.
    """

    source: LoadedModel
    target: LoadedModel
    depths: tuple[int, int]
    cmap: CacheMap
    share: Share
    dtype: torch.dtype


def layered_pair(
    names: tuple[str, str], recipe: Recipe, device: torch.device, dtype: torch.dtype
) -> Pair:
    """Build one layer of each model and a share of a map.

    The models compute in the dtype that is fastest here, their caches are of `dtype`.
    """
    fast = fast_dtype(dtype, device)
    depths = tuple(config_of(name).num_hidden_layers for name in names)
    source, target = (random_model(name, device, fast, depth=1) for name in names)
    whole = tuple(
        replace(loaded.signature, geometry=deepened(loaded, depth))
        for loaded, depth in zip((source, target), depths, strict=True)
    )
    cmap, share = share_map(whole, recipe, device, dtype)
    return Pair(source, target, depths, prepare(cmap, device), share, dtype)


def prefill_seconds(
    loaded: LoadedModel, token_ids: torch.Tensor, depth: int, clock: Clock, past=None
) -> tuple[float, KVCache]:
    """Return the seconds of a prefill of `depth` layers, and the one layer's cache."""
    (cache, _), one = clock.timed(partial(prefill, loaded, token_ids, past=past))
    rest = clock.timed(partial(_outside, loaded, token_ids))[1]
    return rest + depth * max(one - rest, 0.0), cache


@torch.no_grad()
def _outside(loaded: LoadedModel, token_ids: torch.Tensor) -> Any:
    """Compute what is not a layer: embedding, and logits of the last token."""
    hidden = loaded.model.get_input_embeddings()(token_ids)
    return loaded.model.get_output_embeddings()(hidden[:, -1:])


def products_alone(cmap: CacheMap, tokens: int, clock: Clock) -> float:
    """Return the seconds of the map's batched products alone: operands ready, same chunks."""
    weights = factors(cmap)
    groups = len(weights[0])
    chunk = min(tokens, PRODUCT_TOKENS)
    x = weights[0].new_ones(groups, chunk, max(weight.shape[1] for weight in weights))
    made = {q: x.new_ones(groups, chunk, q) for q in {weight.shape[2] for weight in weights}}

    def run() -> None:
        for start in range(0, tokens, chunk):
            rows = min(chunk, tokens - start)
            for weight in weights:
                out = made[weight.shape[2]][:, :rows]
                torch.bmm(x[:, :rows, : weight.shape[1]], weight, out=out)

    return clock.timed(run)[1]
