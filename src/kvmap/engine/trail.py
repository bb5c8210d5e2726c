"""What a map reads of the tokens before: the source's first layer, some tokens late."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvmap.cache import KVCache


@dataclass(frozen=True)
class Trail:
    """The source's first layer of a chunk of T tokens and of n tokens before it.

    Zeros stand where there is no token so far back, or padding.

    Attributes:
        keys: [B, H_s, n + T, D_s], rotated.
        values: Alike.
        positions: [B, n + T].
        lookback: n.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    lookback: int

    @classmethod
    def of(
        cls, cache: KVCache, start: int, stop: int, lookback: int, ahead: KVCache | None = None
    ) -> Trail:
        """Lay out the trail of tokens start..stop of a cache.

        Args:
            ahead: What stands before the cache itself, where anything does.
        """
        parts = [cache.lowest(1).slice(max(0, start - lookback), stop)]
        missing = max(0, lookback - start)
        if missing and ahead is not None:
            parts.insert(0, ahead.lowest(1).slice(max(0, ahead.tokens - missing), ahead.tokens))
            missing -= parts[0].tokens
        keys, values = (
            pad(torch.cat([_real(part, side(part)[0]) for part in parts], 2), (0, 0, missing, 0))
            for side in (attrgetter("keys"), attrgetter("values"))
        )
        positions = torch.cat([part.positions for part in parts], dim=1)
        return cls(keys, values, pad(positions, (missing, 0)), lookback)

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
