"""Which columns of the inputs X belong to which layer, and which of them a target layer reads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvmap.mapping import CacheMap

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Layout:
    """Where a map's inputs stand in X.

    Attributes:
        groups: G.
        source: Columns of one source layer.
        anchor: Columns of the target's own first layer.
        back: Columns of one layer of the source of one token before.
        late: Layers that are read of all tokens before.
        outputs: Columns q of one target layer's keys, or values.
        places: Source layers in the order of their columns.
        alike: Ranges of places whose layers' keys turn alike.
        alike_targets: Ranges of target layers that turn alike, an exact one by itself.
        reads: By target layer, the ranges of columns that it reads, neighbours merged.
        angles: Numbers that the cos and sin of one position take, of all tables.
    """

    groups: int
    source: int
    anchor: int
    back: int
    late: int
    outputs: int
    places: tuple[int, ...]
    alike: Ranges
    alike_targets: Ranges
    reads: tuple[Ranges, ...]
    angles: int

    @classmethod
    def of(cls, cmap: CacheMap) -> Layout:
        source, target = cmap.source.geometry, cmap.target.geometry
        matched = cmap.options.heads == "matched"
        groups = target.kv_heads if matched else 1
        width = source.head_size if matched else source.width
        columns = width * (2 if cmap.options.joint else 1)
        outputs = target.width // groups
        anchor, back = 2 * outputs * cmap.options.anchor, 2 * width
        late = cmap.options.late_layers(source)
        places = cmap.source_layers
        extra = len(places) * columns
        shared = (extra, extra + anchor + late * back)
        reads = []
        for layer in cmap.layers:
            starts = [places.index(s) * columns for s in layer.source_layers] if layer else []
            ranges = [(start, start + columns) for start in starts]
            reads.append(_merged([*ranges, shared] if layer else []))
        turns = [
            table if layer else at
            for at, (table, layer) in enumerate(zip(target.rope, cmap.layers, strict=True))
        ]
        return cls(
            groups,
            columns,
            anchor,
            back,
            late,
            outputs,
            places,
            _runs([source.rope[layer] for layer in places]),
            _runs(turns),
            tuple(reads),
            sum(2 * side.head_size * len(set(side.rope)) for side in (source, target)),
        )

    @property
    def extra(self) -> int:
        """Where the columns begin that every target layer reads: anchor, then tokens before."""
        return len(self.places) * self.source

    @property
    def columns(self) -> int:
        """C."""
        return self.extra + self.anchor + self.late * self.back


def _merged(ranges: list[tuple[int, int]]) -> Ranges:
    """Return ranges without the empty ones, neighbours as one."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif start < stop:
            merged.append((start, stop))
    return tuple(merged)


def _runs(items: list) -> Ranges:
    """Return the ranges of a list's places that hold the same."""
    found, start = [], 0
    for _, run in groupby(items):
        stop = start + len(list(run))
        found.append((start, stop))
        start = stop
    return tuple(found)
