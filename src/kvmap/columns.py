"""Which entries of two caches a regression reads and predicts.

A block is one layer's keys or values of one KV head: D columns of a design matrix whose
rows are tokens. Moments are kept for groups of blocks. `heads="all"` keeps every source
block beside every other, so any map can be fitted later; `heads="matched"` keeps one group
per target head with its own source head only, which is H times smaller (arXiv 2609.00891).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvmap.geometry import Geometry

KINDS = ("key", "value")


@dataclass(frozen=True, order=True)
class Block:
    """D columns of one token's row.

    `side` is "source", "target", or "before": the target's, of the token before. `kind` is
    "key" (content space) or "value".
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
    return {"source": source.head_size, "target": target.head_size, "before": target.head_size}


def head_assignment(source_heads: int, target_heads: int) -> tuple[int, ...]:
    """Return the source KV head each target KV head reads, by index ratio."""
    return tuple(head * source_heads // target_heads for head in range(target_heads))


def blocks(
    geometry: Geometry, side: str, kind: str, heads: tuple[int, ...] | None = None
) -> Iterator[Block]:
    """Yield one side's blocks of a kind, layer by layer, head by head."""
    for layer in range(geometry.layers):
        for head in heads if heads is not None else range(geometry.kv_heads):
            yield Block(side, kind, layer, head)


def groups(source: Geometry, target: Geometry, heads: str, joint: bool) -> tuple[Group, ...]:
    """Return the groups of moments from which maps of these options can be fitted.

    Args:
        heads: "all" or "matched".
        joint: Keep keys beside values, and the target's layer 0 (the anchor), of the token and
            of the one before, beside both.
    """
    if heads == "all":
        return tuple(_head_groups(source, target, None, None, joint, "all"))
    found = []
    for head, source_head in enumerate(head_assignment(source.kv_heads, target.kv_heads)):
        found += _head_groups(source, target, (source_head,), (head,), joint, f"head{head}")
    return tuple(found)


def _head_groups(source, target, source_heads, target_heads, joint, name) -> Iterator[Group]:
    kinds = [KINDS] if joint else [("key",), ("value",)]
    for subset in kinds:
        inputs = [b for kind in subset for b in blocks(source, "source", kind, source_heads)]
        outputs = [b for kind in subset for b in blocks(target, "target", kind, target_heads)]
        anchors = [b for b in outputs if b.layer == 0] if joint else []
        anchors += [replace(block, side="before") for block in anchors]
        yield Group(name if joint else f"{name}.{subset[0]}", (*inputs, *anchors), tuple(outputs))
