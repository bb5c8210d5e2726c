"""A model's cache of some tokens as rows: keys without their positions, and values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvmap.columns import BACK, KINDS
from kvmap.geometry import Geometry
from kvmap.models import LoadedModel, prefill
from kvmap.rope import strip


def row_width(geometry: Geometry, lookback: int) -> int:
    """Return how many numbers a row has, layer 0 of the tokens before with them."""
    return 2 * (geometry.layers + lookback) * geometry.width


def content_rows(
    loaded: LoadedModel, token_ids: Tensor, stride: int, lookback: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield content keys and values [B·T/stride, H, D] layer by layer, by their names in a dump.

    Args:
        lookback: Add layer 0 of that many tokens before each; zeros where there is none.
    """
    cache, _ = prefill(loaded, token_ids)
    kept = torch.arange(0, token_ids.shape[1], stride, device=loaded.device)
    positions = cache.positions[:, kept]
    for layer, table in enumerate(loaded.signature.geometry.rope):
        # A model spread over devices keeps each layer's cache where the layer is.
        place = cache.keys[layer].device
        keys = strip(cache.keys[layer][:, :, kept.to(place)], positions.to(place), table)
        values = cache.values[layer][:, :, kept.to(place)]
        for kind, tensor in (("key", keys), ("value", values)):
            yield f"{kind}.{layer}", _as_rows(tensor, loaded.dtype)
    if not lookback:
        return
    table = loaded.signature.geometry.rope[0]
    first = (strip(cache.keys[0], cache.positions, table), cache.values[0])
    for back, side in enumerate(BACK[:lookback], 1):
        for kind, tensor in zip(KINDS, first, strict=True):
            late = pad(tensor, (0, 0, back, -back))[:, :, kept.to(tensor.device)]
            yield f"{side}.{kind}", _as_rows(late, loaded.dtype)


def _as_rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [B, H, T, D] as [B·T, H, D] on the CPU."""
    return tensor.transpose(1, 2).flatten(0, 1).to(dtype).cpu()
