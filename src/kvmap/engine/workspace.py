"""The memory that mapping takes beside the two caches, and the chunk of tokens that it allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvmap.cache import KVCache
from kvmap.columns import KINDS
from kvmap.engine.layout import Layout
from kvmap.engine.precision import compute_dtype, weight_dtype

if TYPE_CHECKING:
    from kvmap.mapping import CacheMap

# What mapping may hold beside the two caches, and the bounds of the chunk that follows.
EXTRA_BYTES = {"cpu": 96 << 20, "cuda": 1 << 30}
# A CPU multiplies fastest while a chunk's inputs stay in its caches.
LEAST_TOKENS = 64
MOST_TOKENS = {"cpu": 1024, "cuda": 4096}


@dataclass(frozen=True)
class Workspace:
    """What one call of `apply` holds beside the two caches, and the map it is for.

    Attributes:
        chunk: Tokens mapped at a time.
        inputs: X [G, B·chunk, C] by kind; the same one for both where they are joint.
        gathered: [G, B·chunk, p].
        products: [G, B·chunk, q].
        hidden: [G, B·chunk, r] between the two factors of weights of low rank.
    """

    layout: Layout
    chunk: int
    inputs: dict[str, Tensor]
    gathered: Tensor
    products: Tensor
    hidden: Tensor

    @classmethod
    def of(cls, cmap: CacheMap, cache: KVCache) -> Workspace:
        layout, device = Layout.of(cmap), cache.keys[0].device
        dtype = compute_dtype(weight_dtype(cmap), device.type)
        copies = 1 if cmap.options.joint else 2
        scattered = [
            layer.key.weight.shape[1]
            for layer in cmap.layers
            if layer and len(layout.segments(layer.source_layers)) > 1
        ]
        parts = [layer.of(kind) for layer in cmap.layers if layer for kind in KINDS]
        rank = max((part.weight.shape[2] for part in parts if part.up is not None), default=0)
        gathered = max(scattered, default=0)
        widths = (*[layout.columns] * copies, gathered, layout.outputs, rank)
        chunk = _chunk_tokens(cmap, cache, layout.groups * sum(widths) * dtype.itemsize)
        rows = cache.positions.shape[0] * chunk
        *inputs, gathered, products, hidden = (
            torch.empty(layout.groups, rows, width, dtype=dtype, device=device) for width in widths
        )
        by_kind = dict(zip(KINDS, inputs * (3 - copies), strict=True))
        return cls(layout, chunk, by_kind, gathered, products, hidden)


def _chunk_tokens(cmap: CacheMap, cache: KVCache, held: int) -> int:
    """Return how many tokens are mapped at a time.

    Args:
        held: Bytes that one token of one sequence takes in the workspace.
    """
    # Beside the workspace, one layer passes in fp32, with temporaries of its own size.
    passing = 4 * 4 * max(cmap.source.geometry.width, cmap.target.geometry.width)
    each = (held + passing) * cache.positions.shape[0]
    kind = "cuda" if cache.keys[0].is_cuda else "cpu"
    fits = EXTRA_BYTES[kind] // each
    return min(cache.tokens, max(LEAST_TOKENS, min(fits, MOST_TOKENS[kind])))
