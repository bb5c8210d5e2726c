"""What a map is, and how it turns a source's cache into a target's.

For target layer t and chosen source layers S:  K̂_t = R_t(concat_S(R_s⁻¹K_s, …)·W_K + b_K),
V̂_t likewise without the rotations. The inputs are the chosen layers' keys for keys and values
for values (arXiv 2608.03893); `joint` gives both to both; `anchor` appends the target's own
layer-0 keys and values, which depend on the token alone; `heads="matched"` lets each target
head read its own source head only (arXiv 2609.00891).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmap import artifacts
from kvmap.cache import KVCache, check_shapes
from kvmap.columns import KINDS, Block
from kvmap.errors import UsageError
from kvmap.geometry import Geometry, Signature
from kvmap.rope import rotate, strip

# Tokens mapped at a time: bounds what mapping needs beside the two caches.
TOKEN_CHUNK = 2048


@dataclass(frozen=True)
class MapOptions:
    """What a map reads and which parts of the target's cache are not mapped at all.

    Attributes:
        heads: "all" or "matched".
        joint: Keys and values are each predicted from both.
        anchor: The target's own layer 0 is an input of every other layer.
        exact_first: The target's layer 0 is computed, not mapped.
        native_head: First tokens that the target prefills itself; the fit leaves them out.
        native_tail: Last tokens that the target runs over the mapped cache, at least 1.
        assignment: Source KV head of each target KV head, for matched heads.
    """

    heads: str = "all"
    joint: bool = False
    anchor: bool = False
    exact_first: bool = False
    native_head: int = 0
    native_tail: int = 1
    assignment: tuple[int, ...] = ()

    @property
    def exact_layers(self) -> int:
        """Number of the target's lowest layers that are computed, not mapped."""
        return int(self.exact_first)

    @property
    def shared(self) -> bool:
        """Whether keys and values are predicted from the same inputs."""
        return self.joint


@dataclass(frozen=True)
class Affine:
    """y = xW + b, per group of heads: weight [G, p, q], bias [G, q]; G is 1 or H_t."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class LayerMap:
    """How one target layer's keys and values come about."""

    source_layers: tuple[int, ...]
    key: Affine
    value: Affine

    def of(self, kind: str) -> Affine:
        """Return the part that makes "key" or "value"."""
        return self.key if kind == "key" else self.value


FirstLayer = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class CacheMap:
    """A fitted map from one model's cache to another's.

    `layers` has one entry per target layer, None where the layer is exact.
    """

    source: Signature
    target: Signature
    layers: tuple[LayerMap | None, ...]
    options: MapOptions
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def needs_target(self) -> bool:
        """Whether applying the map takes the target's own layer 0."""
        return self.options.anchor or self.options.exact_first

    @property
    def source_layers(self) -> tuple[int, ...]:
        """The source layers that any target layer reads."""
        return tuple(sorted({s for layer in self.layers if layer for s in layer.source_layers}))

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        parts = [part for layer in self.layers if layer for part in (layer.key, layer.value)]
        return sum(part.weight.numel() + part.bias.numel() for part in parts)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> CacheMap:
        """Return the map with its weights on a device, in a dtype."""
        move = lambda part: Affine(part.weight.to(device, dtype), part.bias.to(device, dtype))  # noqa: E731
        layers = tuple(
            layer and LayerMap(layer.source_layers, move(layer.key), move(layer.value))
            for layer in self.layers
        )
        return CacheMap(self.source, self.target, layers, self.options, self.provenance)

    def apply(self, cache: KVCache, first: FirstLayer | None = None) -> KVCache:
        """Return the target's cache for the source's, at the same positions.

        Args:
            cache: The source's; keys rotated, [B, H_s, T, D_s].
            first: The target's own layer 0 for the same tokens, rotated keys and values
                [B, H_t, T, D_t]; needed where `needs_target`.

        Raises:
            UsageError: The cache is not of the source's shape, or `first` is missing.
        """
        check_shapes(cache, self.source, "the cache to map")
        if self.needs_target and first is None:
            raise UsageError(
                "this map reads the target's own first layer; pass the target model, or fit with "
                "`--no-anchor --no-exact-first`"
            )
        keys, values = self._allocate(cache)
        for start in range(0, cache.tokens, TOKEN_CHUNK):
            stop = min(start + TOKEN_CHUNK, cache.tokens)
            part = None if first is None else tuple(tensor[:, :, start:stop] for tensor in first)
            self._apply_chunk(
                cache.slice(start, stop), part, [t[:, :, start:stop] for t in (*keys, *values)]
            )
        return KVCache(tuple(keys), tuple(values), cache.positions, cache.token_ids, cache.mask)

    def _allocate(self, cache: KVCache) -> tuple[list[Tensor], list[Tensor]]:
        geometry = self.target.geometry
        shape = (cache.positions.shape[0], geometry.kv_heads, cache.tokens, geometry.head_size)
        like = cache.keys[0]
        made = [
            torch.empty(shape, dtype=like.dtype, device=like.device)
            for _ in range(2 * geometry.layers)
        ]
        return made[: geometry.layers], made[geometry.layers :]

    def _apply_chunk(self, cache: KVCache, first: FirstLayer | None, out: list[Tensor]) -> None:
        """Write one chunk's mapped keys, then values, of all layers into views."""
        dtype = next(layer.key.weight.dtype for layer in self.layers if layer)
        entries = content_entries(cache, self.source.geometry, self.source_layers, dtype)
        anchors = self._anchors(first, cache.positions, dtype)
        for index, layer in enumerate(self.layers):
            key_out, value_out = out[index], out[len(self.layers) + index]
            if layer is None:
                key_out.copy_(first[0])
                value_out.copy_(first[1])
                continue
            table = self.target.geometry.rope[index]
            mapped = {kind: self._predict(layer, kind, entries, anchors) for kind in KINDS}
            key_out.copy_(rotate(mapped["key"], cache.positions, table))
            value_out.copy_(mapped["value"])

    def _anchors(
        self, first: FirstLayer | None, positions: Tensor, dtype: torch.dtype
    ) -> list[Tensor]:
        if not self.options.anchor:
            return []
        content = strip(first[0], positions, self.target.geometry.rope[0])
        return [content.to(dtype), first[1].to(dtype)]

    def _predict(self, layer: LayerMap, kind: str, entries: dict, anchors: list[Tensor]) -> Tensor:
        """Return one layer's content keys or values, [B, H_t, T, D_t]."""
        kinds = KINDS if self.options.joint else (kind,)
        inputs = [entries[part, source] for source in layer.source_layers for part in kinds]
        affine = layer.of(kind)
        if self.options.heads == "matched":
            inputs = [tensor[:, list(self.options.assignment)] for tensor in inputs]
            x = torch.cat((*inputs, *anchors), dim=-1)  # [B, H_t, T, p]
            return x @ affine.weight + affine.bias[:, None]
        flat = [tensor.transpose(1, 2).flatten(2) for tensor in (*inputs, *anchors)]
        y = torch.cat(flat, dim=-1) @ affine.weight[0] + affine.bias[0]  # [B, T, H_t·D_t]
        return y.unflatten(-1, (self.target.geometry.kv_heads, -1)).transpose(1, 2)

    def map(self, cache: Any, positions: Tensor | None = None, target: Any = None) -> Any:
        """Map a transformers cache and return one that the target's `generate` takes.

        Args:
            cache: The source's DynamicCache, or a KVCache.
            positions: [B, T] absolute; 0..T-1 if not given.
            target: The target as a LoadedModel; gives the model its cache class, and the
                first layer where `needs_target` (then `cache` must be a KVCache with token ids).
        """
        from kvmap.models import first_layer, from_dynamic_cache, to_dynamic_cache

        if not isinstance(cache, KVCache):
            tokens = cache.layers[0].keys.shape[-2]
            if positions is None:
                positions = torch.arange(tokens)[None].expand(cache.layers[0].keys.shape[0], -1)
            cache = from_dynamic_cache(cache, positions, None, None)
        needs = self.needs_target and target is not None and cache.token_ids is not None
        first = first_layer(target, cache.token_ids, cache.positions) if needs else None
        return to_dynamic_cache(self.apply(cache, first), target)

    def save(self, path: Path | str) -> Path:
        """Write the map as an artifact of kind "map"."""
        tensors = {}
        for index, layer in enumerate(self.layers):
            for kind in KINDS if layer else ():
                tensors[f"layers.{index}.{kind}.weight"] = layer.of(kind).weight.contiguous()
                tensors[f"layers.{index}.{kind}.bias"] = layer.of(kind).bias.contiguous()
        metadata = {
            "source": self.source.to_json(),
            "target": self.target.to_json(),
            "options": asdict(self.options),
            "layers": [list(layer.source_layers) if layer else None for layer in self.layers],
            "provenance": self.provenance,
        }
        return artifacts.write(path, "map", tensors, metadata)

    @classmethod
    def load(cls, path: Path | str) -> CacheMap:
        """Read a map.

        Raises:
            UsageError: The file is no sound map.
        """
        artifact = artifacts.open_artifact(path, "map")
        data = artifact.metadata
        try:
            options = MapOptions(
                **{**data["options"], "assignment": tuple(data["options"]["assignment"])}
            )
            source, target = (Signature.from_json(data[side]) for side in ("source", "target"))
            layers = tuple(
                None if chosen is None else _load_layer(artifact, index, tuple(chosen))
                for index, chosen in enumerate(data["layers"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path}: the map's header is not sound ({error}); fit it again"
            ) from error
        made = cls(source, target, layers, options, data["provenance"])
        _check_weights(made, path)
        return made


def _load_layer(artifact: Any, index: int, source_layers: tuple[int, ...]) -> LayerMap:
    parts = {
        kind: Affine(
            *(artifact.tensor(f"layers.{index}.{kind}.{part}") for part in ("weight", "bias"))
        )
        for kind in KINDS
    }
    return LayerMap(source_layers, **parts)


def _check_weights(made: CacheMap, path: Path | str) -> None:
    source, target = made.source.geometry, made.target.geometry
    if len(made.layers) != target.layers:
        raise UsageError(
            f"{path}: found {len(made.layers)} layers, expected {target.layers}; fit the map again"
        )
    for index, layer in enumerate(made.layers):
        if layer and not all(0 <= s < source.layers for s in layer.source_layers):
            raise UsageError(
                f"{path}: layer {index} reads source layers {list(layer.source_layers)}, expected "
                f"0 to {source.layers - 1} of {made.source.name}; fit the map again"
            )
        for kind in KINDS if layer else ():
            weight = weight_shape(made.options, len(layer.source_layers), source, target)
            for part, expected in (("weight", weight), ("bias", (weight[0], weight[2]))):
                found = tuple(getattr(layer.of(kind), part).shape)
                if found != expected:
                    raise UsageError(
                        f"{path}: layer {index}'s {kind} {part} is {found}, "
                        f"expected {expected}; fit the map again"
                    )


def weight_shape(
    options: MapOptions, k: int, source: Geometry, target: Geometry
) -> tuple[int, int, int]:
    """Return [G, p, q] of one layer's key or value weight for k source layers."""
    kinds = 2 if options.joint else 1
    if options.heads == "matched":
        p = k * kinds * source.head_size + (2 * target.head_size if options.anchor else 0)
        return target.kv_heads, p, target.head_size
    p = k * kinds * source.width + (2 * target.width if options.anchor else 0)
    return 1, p, target.width


def input_blocks(
    options: MapOptions,
    source_layers: tuple[int, ...],
    kind: str,
    head: int | None,
    heads: tuple[int, int],
) -> list[Block]:
    """Return a regression's inputs in the order `CacheMap.apply` lays them side by side.

    Args:
        kind: What is predicted.
        head: The target head for matched heads, None for all heads.
        heads: Number of source and of target KV heads.
    """
    kinds = KINDS if options.joint else (kind,)
    read = range(heads[0]) if head is None else (options.assignment[head],)
    own = range(heads[1]) if head is None else (head,)
    found = [Block("source", part, s, h) for s in source_layers for part in kinds for h in read]
    if options.anchor:
        found += [Block("target", part, 0, h) for part in KINDS for h in own]
    return found


def content_entries(
    cache: KVCache, geometry: Geometry, layers: tuple[int, ...], dtype: torch.dtype
) -> dict[tuple[str, int], Tensor]:
    """Return content keys and values [B, H, T, D] of some layers; each layer is stripped once."""
    entries = {}
    for layer in layers:
        entries["key", layer] = strip(cache.keys[layer], cache.positions, geometry.rope[layer]).to(
            dtype
        )
        entries["value", layer] = cache.values[layer].to(dtype)
    return entries
