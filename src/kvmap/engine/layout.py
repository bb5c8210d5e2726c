"""Which columns of the inputs X belong to which layer, and which of them a target layer reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvmap.mapping import CacheMap


@dataclass(frozen=True)
class Layout:
    """Where a map's inputs stand in X.

    Attributes:
        groups: G.
        source: Columns of one source layer.
        anchor: Columns of the target's own first layer.
        back: Columns of the source's first layer of one token before.
        lookback: Tokens before that are read.
        outputs: Columns q of one target layer's keys, or values.
        places: Source layers in the order of their columns.
    """

    groups: int
    source: int
    anchor: int
    back: int
    lookback: int
    outputs: int
    places: tuple[int, ...]

    @classmethod
    def of(cls, cmap: CacheMap) -> Layout:
        source, target = cmap.source.geometry, cmap.target.geometry
        matched = cmap.options.heads == "matched"
        groups = target.kv_heads if matched else 1
        width = source.head_size if matched else source.width
        outputs = target.width // groups
        return cls(
            groups,
            width * (2 if cmap.options.joint else 1),
            2 * outputs * cmap.options.anchor,
            2 * width,
            cmap.options.lookback,
            outputs,
            cmap.source_layers,
        )

    @property
    def extra(self) -> int:
        """Where the columns begin that every target layer reads: anchor, then tokens before."""
        return len(self.places) * self.source

    @property
    def columns(self) -> int:
        """C."""
        return self.extra + self.anchor + self.lookback * self.back

    def segments(self, source_layers: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return the ranges of columns that a target layer reads, neighbours merged."""
        starts = [self.places.index(layer) * self.source for layer in source_layers]
        ranges = [(start, start + self.source) for start in starts]
        if self.columns > self.extra:
            ranges.append((self.extra, self.columns))
        merged = ranges[:1]
        for start, stop in ranges[1:]:
            if merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        return merged
