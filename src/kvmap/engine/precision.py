"""In which dtype a map's products are computed."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvmap.mapping import CacheMap


def prepare(cmap: CacheMap, device: torch.device | str) -> CacheMap:
    """Return the map with its weights on a device, in the dtype it computes in there.

    `apply` sees to that layer by layer as it goes; a map that is applied often gains from
    having it done once.
    """
    return cmap.to(device, compute_dtype(weight_dtype(cmap), torch.device(device).type))


def weight_dtype(cmap: CacheMap) -> torch.dtype:
    """Return the dtype of a map's weights."""
    return next((layer.key.weight.dtype for layer in cmap.layers if layer), torch.float32)


@lru_cache(maxsize=16)
def compute_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """Return the dtype to multiply in: fp32 where a CPU only emulates the weights' own."""
    if dtype == torch.float32 or device != "cpu":
        return dtype
    seconds = {}
    for candidate in (dtype, torch.float32):
        square = torch.ones(128, 128, dtype=candidate)
        square @ square
        started = time.perf_counter()
        square @ square
        seconds[candidate] = time.perf_counter() - started
    return min(seconds, key=seconds.get)
