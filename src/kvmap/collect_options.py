"""What a calibration keeps of the caches, and which sequences are held out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.calibration_files import Scope
from kvmap.columns import LOOKBACK, first_and_middle
from kvmap.errors import UsageError
from kvmap.geometry import Geometry


@dataclass(frozen=True)
class CollectOptions:
    """What is kept of the caches.

    Attributes:
        stride: Keep every stride-th token.
        held_out: Share of sequences, by sequence, on which nothing is ever fitted.
        native_head: First tokens kept apart, so that a fit can leave them out.
        heads: Which moments are kept: "all" or "matched"; "auto" until `collect_pair.with_scope`.
        joint: Keep keys beside values, and the anchor, in the moments; None like "auto".
        layers: Source layers of each target layer: moments of what these read, and no others;
            None keeps those of all.
        lookback_layers: Source layers kept of the tokens before, in rows and moments; none for
            the first and the middle.
        products: Dtype in which rows are multiplied before they are added up in float64:
            "float64", or "float32", which is faster and costs about six digits.
        dump: Keep the rows.
        moments: Keep the moments.
        batch: Sequences run at a time.
        shard: Sequences per file.
    """

    stride: int = 4
    held_out: float = 0.1
    native_head: int = 4
    heads: str = "auto"
    joint: bool | None = None
    layers: tuple[tuple[int, ...], ...] | None = None
    lookback_layers: tuple[int, ...] = ()
    products: str = "float64"
    dump: bool = True
    moments: bool = True
    batch: int = 4
    shard: int = 32

    def late_layers(self, source: Geometry) -> tuple[int, ...]:
        """Return which source layers are kept of the tokens before."""
        return self.lookback_layers or first_and_middle(source)

    @property
    def scope(self) -> Scope:
        """Which moments are kept."""
        return Scope(self.heads, self.joint, self.layers, self.lookback_layers)


def check_options(options: CollectOptions, sequences: int, length: int) -> None:
    """Check that N sequences of T tokens give a calibration.

    Raises:
        UsageError: Too few sequences or tokens, or a share out of range.
    """
    if not 0 < options.held_out < 1:
        raise UsageError(f"--held-out is {options.held_out}, expected a share between 0 and 1")
    if not options.dump and not options.moments:
        raise UsageError("--no-dump and --no-moments together leave nothing to keep")
    if options.heads not in ("all", "matched") or options.joint is None:
        raise UsageError(
            f"found heads {options.heads!r} and joint {options.joint}, expected all or matched "
            "and True or False; `collect_pair.with_scope` fills in what suits a pair"
        )
    if options.stride < 1 or options.native_head < 0:
        raise UsageError("--stride must be at least 1 and --native-head at least 0")
    if sequences < 2:
        raise UsageError(
            f"found {sequences} sequences of {length} tokens, "
            "expected at least 2; give more text or a smaller --length"
        )
    last = (length - 1) // options.stride * options.stride
    if length <= LOOKBACK or last < options.native_head:
        raise UsageError(
            f"of {length} tokens, one in {options.stride} kept, none is left after the first "
            f"{max(options.native_head, LOOKBACK)}; give a larger --length or a smaller --stride"
        )


def held_out_count(sequences: int, share: float) -> int:
    """Return how many of N sequences are held out."""
    return min(max(1, round(sequences * share)), sequences - 1)


def held_out_mask(sequences: int, share: float) -> Tensor:
    """Return which sequences [N] are held out: evenly spread, at least one and not all."""
    count = held_out_count(sequences, share)
    mask = torch.zeros(sequences, dtype=torch.bool)
    mask[((torch.arange(count) + 1) * sequences) // count - 1] = True
    return mask
