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
        together: Layers whose keys turn at a time.
        inputs: X [G, B·chunk, C] by kind; the same one for both where they are joint. Here and
            below without G where it is 1.
        gathered: [G, B·chunk, p].
        products: [together, G, B·chunk, q].
        hidden: [G, B·chunk, r] between the two factors of weights of low rank.
    """

    layout: Layout
    chunk: int
    together: int
    inputs: dict[str, Tensor]
    gathered: Tensor
    products: Tensor
    hidden: Tensor

    @classmethod
    def of(cls, cmap: CacheMap, cache: KVCache) -> Workspace:
        layout, device = cmap.layout, cache.keys[0].device
        dtype = compute_dtype(weight_dtype(cmap), device.type)
        copies = 1 if cmap.options.joint else 2
        scattered = [
            layer.key.weight.shape[1]
            for layer, reads in zip(cmap.layers, layout.reads, strict=True)
            if len(reads) > 1
        ]
        parts = [layer.of(kind) for layer in cmap.layers if layer for kind in KINDS]
        rank = max((part.weight.shape[2] for part in parts if part.up is not None), default=0)
        widths = (*[layout.columns] * copies, max(scattered, default=0), rank)
        numbers = layout.groups * (sum(widths) + layout.outputs)
        chunk = _chunk_tokens(cmap, cache, numbers * dtype.itemsize)
        rows = cache.positions.shape[0] * chunk
        shape = (rows,) if layout.groups == 1 else (layout.groups, rows)
        *inputs, gathered, hidden = (
            torch.empty(*shape, width, dtype=dtype, device=device) for width in widths
        )
        by_kind = dict(zip(KINDS, inputs * (3 - copies), strict=True))
        together = min(_together(cmap, rows, device), len(cmap.layers))
        products = inputs[0].new_empty(together, *shape, layout.outputs)
        return cls(layout, chunk, together, by_kind, gathered, products, hidden)


def _together(cmap: CacheMap, rows: int, device: torch.device) -> int:
    """Return of how many layers the keys turn at a time: what stays in a CPU's caches."""
    widest = max(cmap.source.geometry.width, cmap.target.geometry.width)
    share = EXTRA_BYTES["cuda" if device.type == "cuda" else "cpu"] // 96
    return max(1, share // (4 * rows * widest))


def _chunk_tokens(cmap: CacheMap, cache: KVCache, held: int) -> int:
    """Return how many tokens are mapped at a time.

    Args:
        held: Bytes that one token of one sequence takes in the workspace.
    """
    # Beside the workspace, one layer passes in fp32, with temporaries of its own size.
    widest = max(cmap.source.geometry.width, cmap.target.geometry.width)
    passing = 4 * (4 * widest + cmap.layout.angles)
    each = (held + passing) * cache.positions.shape[0]
    kind = "cuda" if cache.keys[0].is_cuda else "cpu"
    fits = EXTRA_BYTES[kind] // each
    return min(cache.tokens, max(LEAST_TOKENS, min(fits, MOST_TOKENS[kind])))
