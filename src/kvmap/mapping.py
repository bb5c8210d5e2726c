"""What a map is, and how it turns a source's cache into a target's.

For target layer t and chosen source layers S:  K̂_t = R_t(concat_S(R_s⁻¹K_s, …)·W_K + b_K),
V̂_t likewise without the rotations. The inputs are the chosen layers' keys for keys and values
for values (arXiv 2608.03893); `joint` gives both to both; `anchor` appends the target's own
layer-0 keys and values, which depend on the token alone, and `anchor_before` those of the token
before, which layer 1 is often about; `heads="matched"` lets each target
head read its own source head only (arXiv 2609.00891).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmap import artifacts, engine, header
from kvmap.cache import KVCache, check_shapes
from kvmap.columns import KINDS, Block
from kvmap.errors import UsageError
from kvmap.geometry import Geometry, Signature


@dataclass(frozen=True)
class MapOptions:
    """What a map reads and which parts of the target's cache are not mapped at all.

    Attributes:
        heads: "all" or "matched".
        joint: Keys and values are each predicted from both.
        anchor: The target's own layer 0 is an input of every other layer.
        anchor_before: So is that of the token before; counts only beside `anchor`.
        exact_first: The target's layer 0 is computed, not mapped.
        native_layers: Lowest layers of the target that run natively over the whole context,
            so that their keys and values are exact; 1 is `exact_first`.
        native_head: First tokens that the target prefills itself; the fit leaves them out.
        native_tail: Last tokens that the target runs over the mapped cache, at least 1.
        assignment: Source KV head of each target KV head, for matched heads.
    """

    heads: str = "all"
    joint: bool = False
    anchor: bool = False
    anchor_before: bool = False
    exact_first: bool = False
    native_layers: int = 0
    native_head: int = 0
    native_tail: int = 1
    assignment: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> MapOptions:
        """Rebuild options from a header.

        Raises:
            ValueError: One is not of its type, or out of range.
        """
        made = cls(**data | {"assignment": tuple(map(operator.index, data["assignment"]))})
        for name, kind in (("int", int), ("bool", bool)):
            for field_ in (f for f in fields(cls) if f.type == name):
                if type(getattr(made, field_.name)) is not kind:
                    raise ValueError(f"{field_.name} is no {name}")
        if made.heads not in ("all", "matched"):
            raise ValueError(f"heads are {made.heads!r:.20}, expected all or matched")
        if min(made.native_head, made.native_tail - 1, made.native_layers) < 0:
            raise ValueError("a native part is negative")
        return made

    @property
    def exact_layers(self) -> int:
        """Number of the target's lowest layers that are computed, not mapped."""
        return max(int(self.exact_first), self.native_layers)

    @property
    def anchors(self) -> int:
        """Number of tokens whose own layer 0 is an input: 0, the token, or also the one before."""
        return 1 + self.anchor_before if self.anchor else 0

    @property
    def read_layers(self) -> int:
        """Number of the target's lowest layers that applying the map takes."""
        return max(self.exact_layers, int(self.anchor))

    @property
    def shared(self) -> bool:
        """Whether keys and values are predicted from the same inputs."""
        return self.joint


@dataclass(frozen=True)
class Affine:
    """y = xW + b, per group of heads: weight [G, p, q], bias [G, q]; G is 1 or H_t.

    Attributes:
        up: [G, r, q] where the weight has rank r and is kept as two factors: W = weight·up.
        network: Steps of a network whose output is added to y, ReLU between them.
    """

    weight: Tensor
    bias: Tensor
    up: Tensor | None = None
    network: tuple[Affine, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether weight and bias are all there is."""
        return self.up is None and not self.network

    def __call__(self, x: Tensor) -> Tensor:
        """Return y [..., G, T, q] for inputs x [..., G, T, p]."""
        y = x @ self.weight
        if self.up is not None:
            y = y @ self.up
        y = y + self.bias[:, None]
        for at, step in enumerate(self.network):
            x = step(x if at == 0 else x.relu())
        return y + x if self.network else y

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by the names they have in a file."""
        found = {"weight": self.weight, "bias": self.bias}
        if self.up is not None:
            found["up"] = self.up
        for at, step in enumerate(self.network):
            found |= {f"network.{at}.{name}": tensor for name, tensor in step.tensors().items()}
        return found

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Affine:
        """Rebuild a part from what `tensors` returns.

        Raises:
            KeyError: The weight or the bias of a step is not there.
        """
        steps = {name.split(".")[1] for name in tensors if name.startswith("network.")}
        network = [
            cls(tensors[f"network.{at}.weight"], tensors[f"network.{at}.bias"])
            for at in sorted(map(int, steps))
        ]
        return cls(tensors["weight"], tensors["bias"], tensors.get("up"), tuple(network))

    def each(self, change: Callable[[Tensor], Tensor]) -> Affine:
        """Return the part with every tensor changed."""
        return Affine.of({name: change(tensor) for name, tensor in self.tensors().items()})


@dataclass(frozen=True)
class LayerMap:
    """How one target layer's keys and values come about."""

    source_layers: tuple[int, ...]
    key: Affine
    value: Affine

    def of(self, kind: str) -> Affine:
        """Return the part that makes "key" or "value"."""
        return self.key if kind == "key" else self.value


FirstLayer = tuple[Tensor, ...]


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

    @property
    def source_layers(self) -> tuple[int, ...]:
        """The source layers that any target layer reads."""
        return tuple(sorted({s for layer in self.layers if layer for s in layer.source_layers}))

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        parts = [part for layer in self.layers if layer for part in (layer.key, layer.value)]
        return sum(tensor.numel() for part in parts for tensor in part.tensors().values())

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> CacheMap:
        """Return the map with its weights on a device, in a dtype."""
        return self.each(lambda _, part: part.each(lambda tensor: tensor.to(device, dtype)))

    def each(self, change: Callable[[tuple[int, str], Affine], Affine]) -> CacheMap:
        """Return the map with every part changed; `change` is told its (layer, kind) too."""
        layers = tuple(
            layer
            and LayerMap(
                layer.source_layers, *(change((at, kind), layer.of(kind)) for kind in KINDS)
            )
            for at, layer in enumerate(self.layers)
        )
        return replace(self, layers=layers)

    def apply(
        self,
        cache: KVCache,
        first: FirstLayer | None = None,
        out: KVCache | None = None,
        before: FirstLayer | None = None,
    ) -> KVCache:
        """Return the target's cache for the source's, at the same positions.

        Args:
            cache: The source's; keys rotated, [B, H_s, T, D_s].
            first: The target's own lowest layers for the same tokens, rotated keys and values
                [B, H_t, T, D_t] of layer 0, then of layer 1, as many as `options.read_layers`.
            out: Written and returned instead of a new cache of the source's dtype.
            before: The target's layer 0 of the token before these, rotated key and value
                [B, H_t, 1, D_t], at the position before; None where the context begins.

        Raises:
            UsageError: The cache is not of the source's shape, or `first` is missing.
        """
        check_shapes(cache, self.source, "the cache to map")
        if self.needs_target and first is None:
            raise UsageError(
                "this map reads the target's own first layer; pass the target model, or fit with "
                "`--no-anchor --no-exact-first`"
            )
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

        Args:
            cache: The source's DynamicCache, or a KVCache.
            positions: [B, T] absolute; 0..T-1 if not given.
            target: The target as a LoadedModel; gives its first layer where `needs_target`.
            token_ids: [B, T], for the target's first layer; a KVCache has its own.

        Raises:
            UsageError: The target's first layer is needed, and the target or the tokens are
                missing.
        """
        from kvmap.models import from_dynamic_cache, lowest_layers, to_dynamic_cache

        if not isinstance(cache, KVCache):
            batch, _, tokens, _ = cache.layers[0].keys.shape
            if positions is None:
                places = torch.arange(tokens, device=cache.layers[0].keys.device)
                positions = places[None].expand(batch, -1)
            cache = from_dynamic_cache(cache, positions, token_ids, None)
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
            for kind in KINDS if layer else ():
                for name, tensor in layer.of(kind).tensors().items():
                    tensors[f"layers.{index}.{kind}.{name}"] = tensor
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
        _check_weights(made, path)
        return made


def _load_layer(artifact: Any, index: int, source_layers: tuple[int, ...]) -> LayerMap:
    parts = []
    for kind in KINDS:
        prefix = f"layers.{index}.{kind}."
        names = {name for name in artifact.names() if name.startswith(prefix)}
        names |= {f"{prefix}weight", f"{prefix}bias"}  # which the artifact says it lacks
        parts.append(Affine.of({n.removeprefix(prefix): artifact.tensor(n) for n in names}))
    return LayerMap(source_layers, *parts)


def _check_weights(made: CacheMap, path: Path | str) -> None:
    source, target = made.source.geometry, made.target.geometry
    for name, table in made.r2.items():
        if table.shape != (target.layers, target.kv_heads):
            raise UsageError(
                f"{path}: r2.{name} is {tuple(table.shape)}, expected "
                f"{(target.layers, target.kv_heads)}; fit the map again"
            )
    if made.options.heads == "matched":
        heads = made.options.assignment
        if len(heads) != target.kv_heads or not all(0 <= h < source.kv_heads for h in heads):
            raise UsageError(
                f"{path}: assigns heads {list(heads)}, expected {target.kv_heads} from 0 to "
                f"{source.kv_heads - 1}; fit the map again"
            )
    if len(made.layers) != target.layers:
        raise UsageError(
            f"{path}: found {len(made.layers)} layers, expected {target.layers}; fit the map again"
        )
    for index, layer in enumerate(made.layers):
        if (layer is None) != (index < made.options.exact_layers):
            raise UsageError(
                f"{path}: layer {index} is {'not ' if layer is None else ''}mapped, unlike what "
                "the map's options say; fit the map again"
            )
        if layer and not all(0 <= s < source.layers for s in layer.source_layers):
            raise UsageError(
                f"{path}: layer {index} reads source layers {list(layer.source_layers)}, expected "
                f"0 to {source.layers - 1} of {made.source.name}; fit the map again"
            )
        for kind in KINDS if layer else ():
            part = layer.of(kind)
            weight = weight_shape(made.options, len(layer.source_layers), source, target)
            for name, expected in _part_shapes(part, *weight).items():
                found = tuple(part.tensors()[name].shape)
                if found != expected:
                    raise UsageError(
                        f"{path}: layer {index}'s {kind} {name} is {found}, "
                        f"expected {expected}; fit the map again"
                    )


def _part_shapes(part: Affine, groups: int, p: int, q: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes a part's tensors must have; ranks and hidden widths are its own."""
    rank = part.weight.shape[-1]
    shapes = {"weight": (groups, p, q if part.up is None else rank), "bias": (groups, q)}
    if part.up is not None:
        shapes["up"] = (groups, rank, q)
    width = p
    for at, step in enumerate(part.network):
        after = q if at == len(part.network) - 1 else step.weight.shape[-1]
        shapes[f"network.{at}.weight"] = (groups, width, after)
        shapes[f"network.{at}.bias"] = (groups, after)
        width = after
    return shapes


def weight_shape(
    options: MapOptions, k: int, source: Geometry, target: Geometry
) -> tuple[int, int, int]:
    """Return [G, p, q] of one layer's key or value weight for k source layers."""
    kinds = 2 if options.joint else 1
    if options.heads == "matched":
        p = k * kinds * source.head_size + 2 * options.anchors * target.head_size
        return target.kv_heads, p, target.head_size
    p = k * kinds * source.width + 2 * options.anchors * target.width
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
    for side in ("target", "before")[: options.anchors]:
        found += [Block(side, part, 0, h) for part in KINDS for h in own]
    return found
