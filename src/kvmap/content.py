"""A model's cache of some tokens as rows: keys without their positions, and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvmap.columns import BACK, KINDS
from kvmap.geometry import Geometry
from kvmap.models import LoadedModel, prefill
from kvmap.rope import strip


def row_width(geometry: Geometry, late: int) -> int:
    """Return how many numbers a row has, `late` layers of tokens before with them."""
    return 2 * (geometry.layers + late) * geometry.width


def content_rows(
    loaded: LoadedModel, token_ids: Tensor, stride: int, lookback: int, late: Sequence[int] = (0,)
) -> Iterator[tuple[str, Tensor]]:
    """Yield content keys and values [B·T/stride, H, D] layer by layer, by their names in a dump.

    Args:
        lookback: Add that many tokens before each; zeros where there is none.
        late: Layers of these.
    """
    cache, _ = prefill(loaded, token_ids)
    kept = torch.arange(0, token_ids.shape[1], stride, device=loaded.device)
    positions = cache.positions[:, kept]
    tables = loaded.signature.geometry.rope
    for layer, table in enumerate(tables):
        # A model spread over devices keeps each layer's cache where the layer is.
        place = cache.keys[layer].device
        keys = strip(cache.keys[layer][:, :, kept.to(place)], positions.to(place), table)
        values = cache.values[layer][:, :, kept.to(place)]
        for kind, tensor in (("key", keys), ("value", values)):
            yield f"{kind}.{layer}", _as_rows(loaded.all_heads(tensor), loaded.dtype)
    for layer in late if lookback else ():
        keys, values = cache.keys[layer], cache.values[layer]
        pair = (strip(keys, cache.positions.to(keys.device), tables[layer]), values)
        for back, side in enumerate(BACK[:lookback], 1):
            for kind, tensor in zip(KINDS, pair, strict=True):
                moved = pad(tensor, (0, 0, back, -back))[:, :, kept.to(tensor.device)]
                yield f"{side}.{kind}.{layer}", _as_rows(loaded.all_heads(moved), loaded.dtype)


def _as_rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [B, H, T, D] as [B·T, H, D] on the CPU."""
    return tensor.transpose(1, 2).flatten(0, 1).to(dtype).cpu()
