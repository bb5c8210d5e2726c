"""A target's cache to be filled: memory that is not yet written."""

from __future__ import annotations

from collections.abc import Sequence
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


def empty_cache(
    geometry: Geometry,
    positions: Tensor,
    dtype: torch.dtype,
    places: Sequence[torch.device] | None = None,
) -> KVCache:
    """Return a cache to be filled for positions [B, T]; the memory is not yet written.

    Args:
        places: Device of each layer; that of the positions if not given.
    """
    batch, tokens = positions.shape
    shape = (batch, geometry.kv_heads, tokens, geometry.head_size)
    places = places or [positions.device] * geometry.layers
    empty = lambda place: torch.empty(shape, dtype=dtype, device=place)  # noqa: E731
    keys, values = (tuple(map(empty, places)) for _ in KINDS)
    return KVCache(keys, values, positions)
