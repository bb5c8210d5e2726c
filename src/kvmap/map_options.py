"""What a map reads, which parts of the target it leaves alone, and the sizes that follow."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from kvmap.columns import BACK, KINDS, LOOKBACK, Block, first_and_middle
from kvmap.geometry import Geometry


@dataclass(frozen=True)
class MapOptions:
    """What a map reads and which parts of the target's cache are not mapped at all.

    Attributes:
        heads: "all" or "matched".
        joint: Keys and values are each predicted from both.
        anchor: The target's own layer 0 is an input of every other layer.
        lookback: Tokens before whose keys and values, of some source layers, are inputs too.
        lookback_layers: These layers, ascending; none, only until a fit begins, for those that
            the calibration keeps.
        exact_first: The target's layer 0 is computed, not mapped.
        native_layers: Lowest layers of the target that run natively over the whole context,
            so that their keys and values are exact; 1 is `exact_first`.
        native_head: First tokens that the target prefills itself; the fit leaves them out.
        native_tail: Last tokens that the target runs over the mapped cache, at least 1.
        tail_share: Share of a context that the native tail may be: more would be a prefill.
        assignment: Source KV head of each target KV head, for matched heads.
    """

    heads: str = "all"
    joint: bool = False
    anchor: bool = False
    lookback: int = 0
    lookback_layers: tuple[int, ...] = (0,)
    exact_first: bool = False
    native_layers: int = 0
    native_head: int = 0
    native_tail: int = 1
    tail_share: float = 0.05
    assignment: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> MapOptions:
        """Rebuild options from a header.

        Raises:
            ValueError: One is not of its type, or out of range.
        """
        listed = {"assignment": data["assignment"], "lookback_layers": data["lookback_layers"]}
        made = cls(**data | {k: tuple(map(operator.index, one)) for k, one in listed.items()})
        for name, kind in (("int", int), ("bool", bool)):
            for field_ in (f for f in fields(cls) if f.type == name):
                if type(getattr(made, field_.name)) is not kind:
                    raise ValueError(f"{field_.name} is no {name}")
        if made.heads not in ("all", "matched"):
            raise ValueError(f"heads are {made.heads!r:.20}, expected all or matched")
        if min(made.native_head, made.native_tail - 1, made.native_layers) < 0:
            raise ValueError("a native part is negative")
        if type(made.tail_share) is not float or not 0 < made.tail_share <= 1:
            raise ValueError(f"tail_share is {made.tail_share!r:.20}, expected up to 1")
        if not 0 <= made.lookback <= LOOKBACK:
            raise ValueError(f"lookback is {made.lookback}, expected 0 to {LOOKBACK}")
        if not ascending(made.lookback_layers):
            raise ValueError("lookback_layers are no ascending layers")
        return made

    @property
    def exact_layers(self) -> int:
        """Number of the target's lowest layers that are computed, not mapped."""
        return max(int(self.exact_first), self.native_layers)

    def tail_length(self, tokens: int) -> int:
        """Return how many last tokens of a context run natively, from 1."""
        return max(1, min(self.native_tail, int(tokens * self.tail_share)))

    @property
    def read_layers(self) -> int:
        """Number of the target's lowest layers that applying the map takes."""
        return max(self.exact_layers, int(self.anchor))

    def late_layers(self, source: Geometry) -> int:
        """Return how many layers of tokens before are read, counted for each of these tokens."""
        return self.lookback * len(self.lookback_layers or first_and_middle(source))

    @property
    def mixed(self) -> bool:
        """Whether a regression reads more than entries of the kind that it predicts."""
        return self.joint or self.anchor or self.lookback > 0


def ascending(layers: tuple[int, ...]) -> bool:
    """Return whether these are layers, one at least, each above the one before."""
    return bool(layers) and layers[0] >= 0 and all(a < b for a, b in pairwise(layers))


def weight_shape(
    options: MapOptions, k: int, source: Geometry, target: Geometry
) -> tuple[int, int, int]:
    """Return [G, p, q] of one layer's key or value weight for k source layers."""
    kinds = 2 if options.joint else 1
    if options.heads == "matched":
        inner, outer, groups = source.head_size, target.head_size, target.kv_heads
    else:
        inner, outer, groups = source.width, target.width, 1
    p = (k * kinds + 2 * options.late_layers(source)) * inner + 2 * options.anchor * outer
    return groups, p, outer


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
    assert options.lookback_layers, "a fit fills it in, see `fit.recipes.with_lookback`"
    kinds = KINDS if options.joint else (kind,)
    read = range(heads[0]) if head is None else (options.assignment[head],)
    own = range(heads[1]) if head is None else (head,)
    found = [Block("source", part, s, h) for s in source_layers for part in kinds for h in read]
    if options.anchor:
        found += [Block("target", part, 0, h) for part in KINDS for h in own]
    for side in BACK[: options.lookback]:
        late = options.lookback_layers
        found += [Block(side, part, s, h) for s in late for part in KINDS for h in read]
    return found
