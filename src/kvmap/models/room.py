"""A cache with room to grow: new tokens are written behind the old ones, nothing is copied.

transformers' own layers join old and new by a copy of everything, once per layer and forward
pass; over a long context that costs as much as mapping it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvmap.cache import KVCache


class RoomyLayer(DynamicLayer):
    """Keys and values [B, H, T, D] at the front of larger tensors; a copy once those are full."""

    def take(self, keys: Tensor, values: Tensor, tokens: int) -> None:
        """Use tensors whose first `tokens` tokens are there already."""
        self.lazy_initialization(keys, values)
        self.room = (keys, values)
        self.keys, self.values = (tensor[:, :, :tokens] for tensor in self.room)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new tokens behind the old ones and return all."""
        start = self.keys.shape[2]
        stop = start + key_states.shape[2]
        inside = not start or self.keys.data_ptr() == self.room[0].data_ptr()
        if not inside or stop > self.room[0].shape[2]:
            return super().update(key_states, value_states, *args, **kwargs)
        for tensor, new in zip(self.room, (key_states, value_states), strict=True):
            tensor[:, :, start:stop] = new
        self.keys, self.values = (tensor[:, :, :stop] for tensor in self.room)
        return self.keys, self.values


def roomy_cache(room: KVCache, tokens: int, config: Any) -> DynamicCache:
    """Return a DynamicCache over a cache of which the first `tokens` tokens are there."""
    built = DynamicCache(config=config)
    built.layers = [RoomyLayer() for _ in built.layers]
    for layer, keys, values in zip(built.layers, room.keys, room.values, strict=True):
        layer.take(keys, values, tokens)
    return built
