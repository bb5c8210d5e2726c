"""A target's cache in blocks of tokens, as serving engines hold it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvmap.cache import KVCache
from kvmap.errors import UsageError


@dataclass(frozen=True)
class PagedCache:
    """Where keys and values of some tokens lie in an engine's blocks of N tokens.

    An engine that keeps keys beside values, or tokens before heads, gives views of its memory.

    Attributes:
        keys: L tensors [blocks, H, N, D], rotated.
        values: L tensors [blocks, H, N, D].
        slots: [B, T] int64, block times N and place in the block of every token; those below 0
            are not written.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    slots: Tensor

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return self.slots.shape[1]

    def slice(self, start: int, stop: int) -> PagedCache:
        """Return tokens start..stop of the same blocks."""
        return replace(self, slots=self.slots[:, start:stop])

    def store(self, cache: KVCache) -> None:
        """Write a cache of T tokens where its slots say.

        Raises:
            UsageError: The blocks or slots are not for such a cache.
        """
        heads, size = cache.keys[0].shape[1], cache.keys[0].shape[3]
        self.check((cache.layers, heads, size), tuple(cache.positions.shape), "the cache")
        for index in range(cache.layers):
            self.store_layer(index, cache.keys[index], cache.values[index])

    def store_layer(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Write one layer's keys and values [B, H, T, D] where their slots say."""
        slots = self.slots.to(keys.device)
        row, token = (slots >= 0).nonzero(as_tuple=True)
        slots = slots[row, token].to(self.keys[index].device)
        for pages, made in ((self.keys[index], keys), (self.values[index], values)):
            block, place = slots // pages.shape[2], slots % pages.shape[2]
            pages[block, :, place] = made[row, :, token].to(pages.device, pages.dtype)

    def check(self, model: tuple[int, int, int], shape: tuple[int, int], what: str) -> None:
        """Check that these are blocks of a model's cache, apart from one another.

        Args:
            model: Its layers L, KV heads H and head size D.
            shape: [B, T] of the tokens.
            what: Has such layers, for the sentence.

        Raises:
            UsageError: Saying what is not so.
        """
        layers, *heads = model
        if (len(self.keys), len(self.values)) != (layers, layers):
            raise UsageError(
                f"the blocks are of {len(self.keys)} layers of keys and {len(self.values)} of "
                f"values, expected {layers} as {what} has"
            )
        pages = (*self.keys, *self.values)
        for one in pages:
            shaped = one.dim() == 4 and [one.shape[1], one.shape[3]] == heads
            # Of eight bits an engine has scales of its own.
            if not shaped or not one.is_floating_point() or one.itemsize < 2:
                raise UsageError(
                    f"found blocks of shape {tuple(one.shape)} in {one.dtype}, expected "
                    f"[blocks, {heads[0]}, tokens, {heads[1]}] as {what} has, in floating point "
                    "of 16 bits or more"
                )
        if len({(one.shape[0], one.shape[2], one.dtype, one.device) for one in pages}) > 1:
            raise UsageError("blocks of different layers differ in number, size, dtype or device")
        folded = any(0 in one.stride() for one in pages if one.numel() > 1)
        if pages[0].numel() and (folded or len({one.data_ptr() for one in pages}) < len(pages)):
            raise UsageError("blocks lie one over the other; give memory of its own to each")
        self._check_slots(shape)

    def _check_slots(self, shape: tuple[int, int]) -> None:
        if self.slots.shape != shape or self.slots.dtype != torch.int64:
            raise UsageError(
                f"found slots {list(self.slots.shape)} {self.slots.dtype}, expected {list(shape)} "
                "torch.int64, one for each token"
            )
        room = self.keys[0].shape[0] * self.keys[0].shape[2]
        used = self.slots[self.slots >= 0]
        if used.numel() and int(used.max()) >= room:
            raise UsageError(f"found slot {int(used.max())}, expected less than {room}")
        if len(used.unique()) < used.numel():
            raise UsageError("two tokens have one slot, expected one for each token")
