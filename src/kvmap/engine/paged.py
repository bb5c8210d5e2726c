"""A target's cache in blocks of tokens, as serving engines hold it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvmap.cache import KVCache
from kvmap.errors import UsageError
from kvmap.geometry import Signature


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

    def slice(self, start: int, stop: int) -> PagedCache:
        """Return tokens start..stop of the same blocks."""
        return replace(self, slots=self.slots[:, start:stop])

    def store(self, cache: KVCache) -> None:
        """Write a cache of T tokens where its slots say."""
        for index in range(len(self.keys)):
            self.store_layer(index, cache.keys[index], cache.values[index])

    def store_layer(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Write one layer's keys and values [B, H, T, D] where their slots say."""
        slots = self.slots.to(keys.device)
        row, token = (slots >= 0).nonzero(as_tuple=True)
        slots = slots[row, token].to(self.keys[index].device)
        for pages, made in ((self.keys[index], keys), (self.values[index], values)):
            block, place = slots // pages.shape[2], slots % pages.shape[2]
            pages[block, :, place] = made[row, :, token].to(pages.device, pages.dtype)

    def check(self, signature: Signature, shape: tuple[int, int]) -> None:
        """Check that these are blocks of a model's cache, for [B, T] tokens.

        Raises:
            UsageError: Saying what is not so.
        """
        geometry = signature.geometry
        if len(self.keys) != geometry.layers or len(self.values) != geometry.layers:
            raise UsageError(
                f"the blocks are of {len(self.keys)} layers of keys and {len(self.values)} of "
                f"values, expected {geometry.layers} as {signature.name} has"
            )
        expected = (geometry.kv_heads, geometry.head_size)
        sizes = set()
        for pages in (*self.keys, *self.values):
            shaped = pages.dim() == 4 and (pages.shape[1], pages.shape[3]) == expected
            # Of eight bits an engine has scales of its own.
            if not shaped or not pages.is_floating_point() or pages.itemsize < 2:
                raise UsageError(
                    f"found blocks of shape {tuple(pages.shape)} in {pages.dtype}, expected "
                    f"[blocks, {expected[0]}, tokens, {expected[1]}] as of {signature.name} in "
                    "floating point of 16 bits or more"
                )
            sizes.add((pages.shape[0], pages.shape[2], pages.dtype, pages.device))
        if len(sizes) > 1:
            raise UsageError("blocks of different layers differ in number, size, dtype or device")
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
