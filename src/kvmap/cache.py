"""A KV cache as plain tensors, and its file.

Shapes, used everywhere: B batch, H KV heads, T tokens, D head size, L layers; suffix s
source, t target. Keys are as the model caches them (after RoPE) unless called content.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from kvmap import artifacts, header
from kvmap.errors import UsageError
from kvmap.geometry import Signature


@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers for the same tokens.

    Attributes:
        keys: L tensors [B, H, T, D], rotated.
        values: L tensors [B, H, T, D].
        positions: [B, T] int64, absolute.
        token_ids: [B, T] int64 or int32, where known.
        mask: [B, T] bool, False on padding; None where nothing is padded.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    positions: Tensor
    token_ids: Tensor | None = None
    mask: Tensor | None = None

    @property
    def layers(self) -> int:
        """Number of layers L."""
        return len(self.keys)

    @property
    def tokens(self) -> int:
        """Number of tokens T, padding included."""
        return self.positions.shape[1]

    @property
    def bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys, *self.values))

    def slice(self, start: int, stop: int) -> KVCache:
        """Return tokens start..stop as views."""
        if (start, stop) == (0, self.tokens):
            return self
        return KVCache(
            tuple(key[:, :, start:stop] for key in self.keys),
            tuple(value[:, :, start:stop] for value in self.values),
            self.positions[:, start:stop],
            None if self.token_ids is None else self.token_ids[:, start:stop],
            None if self.mask is None else self.mask[:, start:stop],
        )

    def only(self, layers: Sequence[int]) -> KVCache:
        """Return some layers, in the order given."""
        keys, values = (tuple(s[layer] for layer in layers) for s in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    def first(self, batch: int) -> KVCache:
        """Return the first sequences of the batch as views."""
        few = lambda tensor: None if tensor is None else tensor[:batch]  # noqa: E731
        keys, values = (tuple(map(few, tensors)) for tensors in (self.keys, self.values))
        return KVCache(keys, values, few(self.positions), few(self.token_ids), few(self.mask))

    def expand(self, batch: int) -> KVCache:
        """Repeat a batch of one as views."""
        if self.positions.shape[0] != 1:
            raise ValueError(f"expand needs a batch of 1, found {self.positions.shape[0]}")
        grow = lambda tensor: None if tensor is None else tensor.expand(batch, *tensor.shape[1:])  # noqa: E731
        return KVCache(
            tuple(map(grow, self.keys)),
            tuple(map(grow, self.values)),
            grow(self.positions),
            grow(self.token_ids),
            grow(self.mask),
        )

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> KVCache:
        """Move keys and values to a device and dtype."""
        move = lambda tensors: tuple(tensor.to(device=device, dtype=dtype) for tensor in tensors)  # noqa: E731
        place = lambda tensor: None if tensor is None else tensor.to(device)  # noqa: E731
        return KVCache(
            move(self.keys),
            move(self.values),
            place(self.positions),
            place(self.token_ids),
            place(self.mask),
        )

    def placed(self, places: Sequence[torch.device]) -> KVCache:
        """Move each layer to its device; what is there already is not copied."""
        move = lambda tensors: tuple(  # noqa: E731
            tensor.to(place) for tensor, place in zip(tensors, places, strict=True)
        )
        return replace(self, keys=move(self.keys), values=move(self.values))

    def copy_to(self, room: KVCache) -> None:
        """Copy keys and values to the front of a larger cache of the same model."""
        place = room.slice(0, self.tokens)
        for index, pair in enumerate(zip(self.keys, self.values, strict=True)):
            place.store_layer(index, *pair)

    def store_layer(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Write one layer's keys and values [B, H, T, D] into this cache's memory."""
        self.keys[index].copy_(keys)
        self.values[index].copy_(values)


def concat(first: KVCache, second: KVCache) -> KVCache:
    """Join two caches of one model along the tokens."""
    join = lambda a, b: tuple(torch.cat(pair, dim=2) for pair in zip(a, b, strict=True))  # noqa: E731
    known = first.token_ids is not None and second.token_ids is not None
    masked = first.mask is not None or second.mask is not None
    return KVCache(
        join(first.keys, second.keys),
        join(first.values, second.values),
        torch.cat((first.positions, second.positions), dim=1),
        torch.cat((first.token_ids, second.token_ids), dim=1) if known else None,
        torch.cat((_full_mask(first), _full_mask(second)), dim=1) if masked else None,
    )


def batched(caches: Sequence[KVCache]) -> KVCache:
    """Join caches of one model, of as many tokens each, none padded, into one batch."""
    join = lambda tensors: torch.cat(tuple(tensors))  # noqa: E731
    known = all(cache.token_ids is not None for cache in caches)
    return KVCache(
        tuple(map(join, zip(*(cache.keys for cache in caches), strict=True))),
        tuple(map(join, zip(*(cache.values for cache in caches), strict=True))),
        join(cache.positions for cache in caches),
        join(cache.token_ids for cache in caches) if known else None,
    )


def _full_mask(cache: KVCache) -> Tensor:
    return torch.ones_like(cache.positions, dtype=torch.bool) if cache.mask is None else cache.mask


def save(
    cache: KVCache, path: Path | str, signature: Signature, native_head: int | None = None
) -> Path:
    """Write a cache, readable by its owner only, as an artifact of kind "cache".

    Args:
        native_head: Of a mapped cache that `handoff.finish` has still to finish: how many first
            tokens the target prefills itself.

    Raises:
        UsageError: The cache is not of the signature's model.
    """
    check_shapes(cache, signature, str(path))
    tensors = {"positions": cache.positions}
    for layer, (key, value) in enumerate(zip(cache.keys, cache.values, strict=True)):
        tensors[f"layers.{layer}.key"], tensors[f"layers.{layer}.value"] = key, value
    optional = {"token_ids": cache.token_ids, "mask": cache.mask}
    tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    metadata = {"model": signature.to_json()}
    metadata |= {} if native_head is None else {"native_head": native_head}
    return artifacts.write(path, "cache", tensors, metadata, private=True)


def load_cache(path: Path | str) -> tuple[KVCache, Signature]:
    """Read a cache and the signature of the model it belongs to.

    Raises:
        UsageError: The file is no sound cache artifact, its shapes are not its model's, or the
            cache is one that `handoff.finish` has still to finish.
    """
    cache, signature, native_head = _load(path)
    if native_head is not None:
        raise UsageError(
            f"{path}: is a mapped cache without its native head and tail; read it with "
            "`kvmap.cache.load_mapped` and let `kvmap.handoff.finish` run them"
        )
    return cache, signature


def load_mapped(path: Path | str) -> tuple[KVCache, Signature, int]:
    """Read what `handoff.map_context` made, its target's signature, and the native head's length.

    Raises:
        UsageError: The file is no sound cache artifact, or a whole cache.
    """
    cache, signature, native_head = _load(path)
    if native_head is None:
        raise UsageError(
            f"{path}: is a whole cache, expected a mapped one that is to be finished; "
            "read it with `kvmap.cache.load_cache`"
        )
    return cache, signature, native_head


def _load(path: Path | str) -> tuple[KVCache, Signature, int | None]:
    artifact = artifacts.open_artifact(path, "cache")
    names = set(artifact.names())
    with header.sound(path, "cache"):
        native_head = artifact.metadata.get("native_head")
        native_head = None if native_head is None else operator.index(native_head)
        signature = Signature.from_json(artifact.metadata["model"])
        layers = range(signature.geometry.layers)
        cache = KVCache(
            tuple(artifact.tensor(f"layers.{layer}.key") for layer in layers),
            tuple(artifact.tensor(f"layers.{layer}.value") for layer in layers),
            artifact.tensor("positions"),
            artifact.tensor("token_ids") if "token_ids" in names else None,
            artifact.tensor("mask") if "mask" in names else None,
        )
    check_shapes(cache, signature, str(path))
    return cache, signature, native_head


def check_shapes(
    cache: KVCache, signature: Signature, where: str, layers: int | None = None
) -> None:
    """Check that a cache has its model's shape.

    Args:
        layers: How many of the model's layers it holds; all if not given.

    Raises:
        UsageError: Naming the first tensor that does not.
    """
    _check_tokens(cache, where)
    geometry = signature.geometry
    layers = geometry.layers if layers is None else layers
    shape = (cache.positions.shape[0], geometry.kv_heads, cache.tokens, geometry.head_size)
    for kind, tensors in (("keys", cache.keys), ("values", cache.values)):
        if len(tensors) != layers:
            raise UsageError(
                f"{where}: found {len(tensors)} layers of {kind}, expected {layers} of "
                f"{signature.name}"
            )
        for layer, tensor in enumerate(tensors):
            if tensor.shape != shape or not tensor.is_floating_point():
                raise UsageError(
                    f"{where}: layer {layer}'s {kind} have shape {tuple(tensor.shape)} in "
                    f"{tensor.dtype}, expected {shape} in floating point; is this a cache of "
                    f"{signature.name}?"
                )


def _check_tokens(cache: KVCache, where: str) -> None:
    """Check what a cache holds by token beside keys and values."""
    positions = cache.positions
    if positions.dim() != 2 or not positions.shape[0] or positions.dtype != torch.int64:
        found = f"{tuple(positions.shape)} {positions.dtype}"
        raise UsageError(
            f"{where}: the positions are {found}, expected [batch, tokens] int64, of one sequence "
            "at least"
        )
    whole = (torch.int64, torch.int32)
    for name, dtypes in (("token_ids", whole), ("mask", (torch.bool,))):
        tensor = getattr(cache, name)
        if tensor is not None and tensor.shape != positions.shape:
            raise UsageError(
                f"{where}: {name} has shape {tuple(tensor.shape)}, "
                f"expected {tuple(positions.shape)} like the positions"
            )
        if tensor is not None and tensor.dtype not in dtypes:
            raise UsageError(f"{where}: {name} is {tensor.dtype}, expected {dtypes[0]}")
