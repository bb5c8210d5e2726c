"""What a map reads, which parts of the target it leaves alone, and the sizes that follow."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import Any

from kvmap.columns import KINDS, Block
from kvmap.geometry import Geometry


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
