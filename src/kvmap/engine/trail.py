"""What a map reads of the tokens before: some source layers, some tokens late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvmap.cache import KVCache
from kvmap.geometry import Geometry
from kvmap.map_options import MapOptions
from kvmap.rope import strip


@dataclass(frozen=True)
class Trail:
    """Some of the source's layers, of a chunk of T tokens and of n tokens before it.

    Zeros stand where there is no token so far back, or padding.

    Attributes:
        parts: Caches of these layers whose tokens follow on one another, n + T less `missing`.
        missing: Tokens that there are none of.
        lookback: n.
        layers: Which ones of the source's these are.
    """

    parts: tuple[KVCache, ...]
    missing: int
    lookback: int
    layers: tuple[int, ...]

    @classmethod
    def of(
        cls,
        cache: KVCache,
        start: int,
        stop: int,
        options: MapOptions,
        ahead: KVCache | None = None,
    ) -> Trail:
        """Lay out the trail of tokens start..stop of a cache.

        Args:
            options: Of the map, which say how many tokens and which layers it reads.
            ahead: What stands before the cache itself, where anything does: all its layers, or
                those that are read alone.
        """
        lookback, layers = options.lookback, options.lookback_layers
        parts = [cache.only(layers).slice(max(0, start - lookback), stop)]
        missing = max(0, lookback - start)
        if missing and ahead is not None:
            ahead = ahead if ahead.layers == len(layers) else ahead.only(layers)
            parts.insert(0, ahead.slice(max(0, ahead.tokens - missing), ahead.tokens))
            missing -= parts[0].tokens
        return cls(tuple(parts), missing, lookback, layers)

    @cached_property
    def positions(self) -> Tensor:
        """[B, n + T]."""
        found = torch.cat([part.positions for part in self.parts], dim=1)
        return pad(found, (self.missing, 0))

    def entries(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rotated keys and values [B, H_s, n + T, D_s] of one layer after the other."""
        for at in range(len(self.layers)):
            yield tuple(
                self._joined([_real(part, getattr(part, name)[at]) for part in self.parts])
                for name in ("keys", "values")
            )

    def content(self, source: Geometry) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the same with the keys stripped of their positions."""
        for layer, (keys, values) in zip(self.layers, self.entries(), strict=True):
            yield strip(keys, self.positions, source.rope[layer]), values

    def _joined(self, tensors: list[Tensor]) -> Tensor:
        joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors, 2)
        return pad(joined, (0, 0, self.missing, 0)) if self.missing else joined

    def late(self, tensor: Tensor, tokens: int) -> Tensor:
        """Return what a tensor of the trail holds of the chunk's T tokens, some tokens late.

        Args:
            tensor: [B, H_s, n + T, D_s] or [B, n + T].
        """
        dimension = min(2, tensor.dim() - 1)
        length = tensor.shape[dimension] - self.lookback
        return tensor.narrow(dimension, self.lookback - tokens, length)


def _real(cache: KVCache, tensor: Tensor) -> Tensor:
    """Return one of a cache's tensors with zeros at its padding."""
    return tensor if cache.mask is None else tensor * cache.mask[:, None, :, None]
