"""Keep moments of the blocks that chosen layers need, where those of all layers do not fit.

Each run of neighbouring target layers has one group of moments: its inputs are the source
layers that any of them reads. A longer run shares more of its Gram matrix but holds pairs of
layers that nobody reads together; the runs are those that hold the fewest numbers in all.
"""

from __future__ import annotations

from functools import cache

from kvmap.columns import Block, Group

Layers = tuple[tuple[int, ...], ...]


def near_layers(index: int, target_layers: int, source_layers: int, k: int) -> tuple[int, ...]:
    """Return k source layers about the one at the same relative depth."""
    middle = round(index * (source_layers - 1) / max(target_layers - 1, 1))
    start = min(max(middle - k // 2, 0), source_layers - k)
    return tuple(range(start, start + k))


def chosen_groups(
    groups: tuple[Group, ...], layers: Layers, sizes: dict[str, int]
) -> tuple[Group, ...]:
    """Return the groups from which maps of a choice of layers can be fitted.

    Args:
        groups: Of all layers.
        layers: Source layers of each target layer.
        sizes: Head size D by side, as `columns.head_sizes` gives it.
    """
    return tuple(part for group in groups for part in _parts(group, layers, sizes))


def groups_apart(groups: tuple[Group, ...], layers: Layers) -> tuple[Group, ...]:
    """Return a group for each target layer alone: the most that a choice of as many takes."""
    return tuple(
        Group(f"{group.name}.layers{at}", *map(tuple, _run(group, layers, at, at + 1)))
        for group in groups
        for at in range(len(layers))
    )


def _run(group: Group, layers: Layers, start: int, stop: int) -> tuple[list[Block], list[Block]]:
    """Return inputs and outputs of neighbouring target layers."""
    read = {s for row in layers[start:stop] for s in row}
    inputs = [b for b in group.inputs if b.side != "source" or b.layer in read]
    return inputs, [b for b in group.outputs if start <= b.layer < stop]


def _parts(group: Group, layers: Layers, sizes: dict[str, int]) -> list[Group]:
    """Split a group at the target layers where that holds the fewest numbers."""

    def width(blocks: list[Block]) -> int:
        return sum(sizes[block.side] for block in blocks)

    @cache
    def run(start: int, stop: int) -> tuple[list[Block], list[Block]]:
        return _run(group, layers, start, stop)

    @cache
    def best(stop: int) -> tuple[int, int]:
        """Return the fewest numbers below layer `stop`, and where their last run starts."""
        if stop == 0:
            return 0, 0
        found = []
        for start in range(stop):
            inputs, outputs = run(start, stop)
            p, q = width(inputs), width(outputs)
            found.append((best(start)[0] + p * (p + q), start))
        return min(found)

    parts, stop = [], len(layers)
    while stop:
        start = best(stop)[1]
        inputs, outputs = run(start, stop)
        parts.append(Group(f"{group.name}.layers{start}", tuple(inputs), tuple(outputs)))
        stop = start
    return parts[::-1]
