"""A target's cache to be filled: memory that is not yet written."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvmap.cache import KVCache
from kvmap.columns import KINDS
from kvmap.geometry import Geometry


def allocate(geometry: Geometry, like: KVCache, dtype: torch.dtype | None = None) -> KVCache:
    """Return a target's cache to be filled, for the tokens and on the device of another cache.

    Args:
        dtype: That of the other cache if not given.
    """
    one = like.keys[0]
    made = empty_cache(geometry, like.positions.to(one.device), dtype or one.dtype)
    return replace(made, token_ids=like.token_ids, mask=like.mask)


def empty_cache(geometry: Geometry, positions: Tensor, dtype: torch.dtype) -> KVCache:
    """Return a cache to be filled for positions [B, T]; the memory is not yet written."""
    batch, tokens = positions.shape
    shape = (batch, geometry.kv_heads, tokens, geometry.head_size)
    empty = lambda: torch.empty(shape, dtype=dtype, device=positions.device)  # noqa: E731
    keys, values = (tuple(empty() for _ in range(geometry.layers)) for _ in KINDS)
    return KVCache(keys, values, positions)
