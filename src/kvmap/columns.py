"""Which entries of two caches a regression reads and predicts.

A block is one layer's keys or values of one KV head: D columns of a design matrix whose
rows are tokens. Moments are kept for groups of blocks. `heads="all"` keeps every source
block beside every other, so any map can be fitted later; `heads="matched"` keeps one group
per target head with its own source head only, which is H times smaller (arXiv 2609.00891).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvmap.geometry import Geometry

KINDS = ("key", "value")
# How many tokens back a regression may look, and the sides of a row that hold what it sees.
LOOKBACK = 3
BACK = tuple(f"back{tokens}" for tokens in range(1, LOOKBACK + 1))


@dataclass(frozen=True, order=True)
class Block:
    """D columns of one token's row.

    `side` is "source", "target", or "back1" and so on: the source's, of a token before. `kind`
    is "key" (content space) or "value".
    """

    side: str
    kind: str
    layer: int
    head: int


@dataclass(frozen=True)
class Group:
    """Blocks whose second moments are kept together."""

    name: str
    inputs: tuple[Block, ...]
    outputs: tuple[Block, ...]


def head_sizes(source: Geometry, target: Geometry) -> dict[str, int]:
    """Return the columns D of a block by its side."""
    of_source = dict.fromkeys(("source", *BACK), source.head_size)
    return of_source | {"target": target.head_size}


def entry_sides(
    source: Geometry, target: Geometry, lookback_layers: tuple[int, ...]
) -> list[tuple[str, Geometry, Sequence[int]]]:
    """Return a row's sides with the model each is of and the layers it holds."""
    back = [(side, source, lookback_layers) for side in BACK]
    whole = [(side, of, range(of.layers)) for side, of in (("source", source), ("target", target))]
    return [*whole, *back]


def head_assignment(source_heads: int, target_heads: int) -> tuple[int, ...]:
    """Return the source KV head each target KV head reads, by index ratio."""
    return tuple(head * source_heads // target_heads for head in range(target_heads))


def first_and_middle(source: Geometry) -> tuple[int, ...]:
    """Return which source layers of the tokens before are kept where nothing else is asked.

    Layer 0 knows which tokens they are, the middle one what they are there.
    """
    return tuple(sorted({0, source.layers // 2}))


def blocks(
    geometry: Geometry, side: str, kind: str, heads: tuple[int, ...] | None = None
) -> Iterator[Block]:
    """Yield one side's blocks of a kind, layer by layer, head by head."""
    for layer in range(geometry.layers):
        for head in heads if heads is not None else range(geometry.kv_heads):
            yield Block(side, kind, layer, head)


def groups(
    source: Geometry,
    target: Geometry,
    heads: str,
    joint: bool,
    lookback_layers: tuple[int, ...] = (0,),
) -> tuple[Group, ...]:
    """Return the groups of moments from which maps of these options can be fitted.

    Args:
        heads: "all" or "matched".
        joint: Keep keys beside values, and beside both the target's layer 0 (the anchor) and
            the source's `lookback_layers` of the tokens before.
    """
    late = lookback_layers if joint else ()
    if heads == "all":
        return tuple(_head_groups(source, target, None, None, joint, late, "all"))
    found = []
    for head, source_head in enumerate(head_assignment(source.kv_heads, target.kv_heads)):
        found += _head_groups(source, target, (source_head,), (head,), joint, late, f"head{head}")
    return tuple(found)


def _head_groups(source, target, source_heads, target_heads, joint, late, name) -> Iterator[Group]:
    kinds = [KINDS] if joint else [("key",), ("value",)]
    for subset in kinds:
        inputs = [b for kind in subset for b in blocks(source, "source", kind, source_heads)]
        outputs = [b for kind in subset for b in blocks(target, "target", kind, target_heads)]
        if joint:
            read = [block for block in inputs if block.layer in late]
            inputs += [block for block in outputs if block.layer == 0]
            inputs += [replace(block, side=side) for side in BACK for block in read]
        yield Group(name if joint else f"{name}.{subset[0]}", tuple(inputs), tuple(outputs))
