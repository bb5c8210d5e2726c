"""What a map is, and how it turns a source's cache into a target's.

For target layer t and chosen source layers S:  K̂_t = R_t(concat_S(R_s⁻¹K_s, …)·W_K + b_K),
V̂_t likewise without the rotations. The inputs are the chosen layers' keys for keys and values
for values (arXiv 2608.03893); `joint` gives both to both; `anchor` appends the target's own
layer-0 keys and values, which depend on the token alone; `lookback` appends keys and values of
the source's `lookback_layers` of the tokens before, which low layers are often about;
`heads="matched"` lets
each target head read its own source head only (arXiv 2609.00891).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmap import artifacts, engine, header
from kvmap.affine import Affine, LayerMap
from kvmap.cache import KVCache, check_shapes
from kvmap.columns import KINDS
from kvmap.engine import FirstLayer, PagedCache
from kvmap.engine.layout import Layout
from kvmap.errors import UsageError
from kvmap.geometry import Signature
from kvmap.map_checks import check_weights
from kvmap.map_options import MapOptions

EMPTY = "the cache to map has no tokens, expected one at least; let the source read a text first"


@dataclass(frozen=True)
class CacheMap:
    """A fitted map from one model's cache to another's.

    `layers` has one entry per target layer, None where the layer is exact. `r2` has tables
    [L_t, H_t] by "train.key", "held_out.key", "train.value", "held_out.value", where known.
    """

    source: Signature
    target: Signature
    layers: tuple[LayerMap | None, ...]
    options: MapOptions
    provenance: dict[str, Any] = field(default_factory=dict)
    r2: dict[str, Tensor] = field(default_factory=dict)

    @property
    def needs_target(self) -> bool:
        """Whether applying the map takes the target's own layer 0."""
        return self.options.read_layers > 0

    @cached_property
    def source_layers(self) -> tuple[int, ...]:
        """The source layers that any target layer reads."""
        return tuple(sorted({s for layer in self.layers if layer for s in layer.source_layers}))

    @cached_property
    def layout(self) -> Layout:
        """Where the inputs stand that the engine lays out."""
        return Layout.of(self)

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        mapped = [layer for layer in self.layers if layer]
        return sum(tensor.numel() for layer in mapped for tensor in layer.tensors().values())

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> CacheMap:
        """Return the map with its weights on a device, in a dtype."""
        return self.each(lambda _, part: part.each(lambda tensor: tensor.to(device, dtype)))

    def each(self, change: Callable[[tuple[int, str], Affine], Affine]) -> CacheMap:
        """Return the map with every part changed; `change` is told its (layer, kind) too."""
        layers = tuple(
            layer and layer.each(lambda kind, part, at=at: change((at, kind), part))
            for at, layer in enumerate(self.layers)
        )
        return replace(self, layers=layers)

    def check_model(self, side: str, found: Signature) -> None:
        """Check that a model is the map's "source" or "target", by digest and shape of its cache.

        Raises:
            UsageError: It is another, or the map's header says of it what is not so.
        """
        getattr(self, side).require_same(found, f"the map's {side}", "fit a map for this pair")

    def apply(
        self,
        cache: KVCache,
        first: FirstLayer | None = None,
        out: KVCache | PagedCache | None = None,
        before: KVCache | None = None,
    ) -> KVCache | PagedCache:
        """Return the target's cache for the source's, at the same positions.

        Args:
            cache: The source's; keys rotated, [B, H_s, T, D_s].
            first: The target's own lowest layers for the same tokens, rotated keys and values
                [B, H_t, T, D_t] of layer 0, then of layer 1, as many as `options.read_layers`.
            out: Written and returned instead of a new cache of the source's dtype; of as many
                sequences and tokens, or a serving engine's blocks for them.
            before: The source's cache of the tokens before these, `options.lookback` of them or
                as many as there are, all layers or `options.lookback_layers` alone; None where the
                context begins.

        Raises:
            UsageError: The cache has no tokens, `first` is missing, or one of these is not of its
                model's shape.
        """
        _check_source(self, cache)
        _check_first(self, cache, first)
        _check_others(self, cache, out, before)
        cache = cache.to(cache.keys[0].device)  # a model may have it on several
        out = out or engine.allocate(self.target.geometry, cache)
        engine.apply(self, cache, first, out, before)
        return out

    def map(
        self,
        cache: Any,
        positions: Tensor | None = None,
        target: Any = None,
        token_ids: Tensor | None = None,
    ) -> Any:
        """Map a transformers cache and return one that the target's `generate` takes.

        The native head and tail are not run, which `kvmap.handoff.handoff` does: a map with a
        native head maps the first tokens badly.

        Args:
            cache: The source's DynamicCache, or a KVCache.
            positions: [B, T] absolute; 0..T-1 if not given.
            target: The target as a LoadedModel; gives its first layer where `needs_target`.
            token_ids: [B, T], for the target's first layer; a KVCache has its own.

        Raises:
            UsageError: The cache is empty or not of the source's shape, the target is not the
                map's, or its first layer is needed, and the target or the tokens are missing.
        """
        from kvmap.models import from_dynamic_cache, lowest_layers, to_dynamic_cache

        if target is not None:
            self.check_model("target", target.signature)
        if not isinstance(cache, KVCache):
            if not cache.get_seq_length():
                raise UsageError(EMPTY)
            batch, _, tokens, _ = cache.layers[0].keys.shape
            if positions is None:
                places = torch.arange(tokens, device=cache.layers[0].keys.device)
                positions = places[None].expand(batch, -1)
            cache = from_dynamic_cache(cache, positions, token_ids, None)
        _check_source(self, cache)
        first = None
        if self.needs_target and target is not None:
            if cache.token_ids is None:
                raise UsageError(
                    "this map reads the target's own first layer, which is made of the tokens; "
                    "pass token_ids"
                )
            count = self.options.read_layers
            first = lowest_layers(target, cache.token_ids, cache.positions, count, mask=cache.mask)
        return to_dynamic_cache(self.apply(cache, first), target)

    def save(self, path: Path | str) -> Path:
        """Write the map as an artifact of kind "map"."""
        tensors = {f"r2.{name}": table for name, table in self.r2.items()}
        for index, layer in enumerate(self.layers):
            for name, tensor in layer.tensors().items() if layer else ():
                tensors[f"layers.{index}.{name}"] = tensor
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
        with header.sound(path, "map"):
            options = MapOptions.from_json(data["options"])
            source, target = (Signature.from_json(data[side]) for side in ("source", "target"))
            layers = tuple(
                None
                if chosen is None
                else _load_layer(artifact, at, tuple(map(operator.index, chosen)))
                for at, chosen in enumerate(data["layers"])
            )
            known = [name for name in artifact.names() if name.startswith("r2.")]
            r2 = {name.removeprefix("r2."): artifact.tensor(name) for name in known}
            made = cls(source, target, layers, options, dict(data["provenance"]), r2)
        check_weights(made, path)
        return made


def _check_source(cmap: CacheMap, cache: KVCache) -> None:
    check_shapes(cache, cmap.source, "the cache to map")
    if not cache.tokens:
        raise UsageError(EMPTY)


def _check_first(cmap: CacheMap, cache: KVCache, first: FirstLayer | None) -> None:
    """Check the target's own lowest layers, where the map reads them."""
    count = cmap.options.read_layers
    if count and first is None:
        raise UsageError(
            "this map reads the target's own first layer; pass the target model, or fit with "
            "`--no-anchor --no-exact-first`"
        )
    if count:
        keys, values = (tuple(first[at : 2 * count : 2]) for at in (0, 1))
        own = KVCache(keys, values, cache.positions)
        check_shapes(own, cmap.target, "the target's own lowest layers", count)


def _check_others(
    cmap: CacheMap, cache: KVCache, out: KVCache | PagedCache | None, before: KVCache | None
) -> None:
    """Check the cache to write and that of the tokens before, where they are given."""
    found, late = cache.positions.shape, len(cmap.options.lookback_layers)
    if isinstance(out, PagedCache):
        target = cmap.target.geometry
        model = (target.layers, target.kv_heads, target.head_size)
        out.check(model, tuple(found), cmap.target.name)
    elif out is not None:
        check_shapes(out, cmap.target, "the cache to write")
        if out.positions.shape != found:
            raise UsageError(
                f"the cache to write is for {list(out.positions.shape)} sequences and tokens, "
                f"expected {list(found)} as of the cache to map"
            )
    if before is not None and cmap.options.lookback:
        layers = late if before.layers == late else None
        check_shapes(before, cmap.source, "the cache of the tokens before", layers)
        if len(before.positions) != found[0]:
            raise UsageError(
                f"the cache of the tokens before is of {len(before.positions)} sequences, "
                f"expected {found[0]} as of the cache to map"
            )


def _load_layer(artifact: Any, index: int, source_layers: tuple[int, ...]) -> LayerMap:
    known = set(artifact.names())
    parts = []
    for kind in KINDS:
        prefix = f"layers.{index}.{kind}."
        names = {name.removeprefix(prefix) for name in known if name.startswith(prefix)}
        names |= {"weight", "bias"}  # which the artifact says it lacks
        # Values of a low rank and no weight of their own have that of the keys.
        shared = kind == "value" and "up" in names and f"{prefix}weight" not in known
        found = {n: artifact.tensor(prefix + n) for n in names if not (shared and n == "weight")}
        parts.append(Affine.of(found | ({"weight": parts[0].weight} if shared else {})))
    return LayerMap(source_layers, *parts)
