"""Running centred second moments of cache entries: mergeable, exact.

Each batch is centred on its own mean and merged with the formula of Chan, Golub and LeVeque
(1979), in float64, so that large means do not cancel. Any map over the recorded blocks can
be fitted from them without running a model again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.columns import Block, Group
from kvmap.errors import UsageError
from kvmap.ridge import Covariance

ACCUMULATE = torch.float64
# Rows multiplied at a time: bounds the float64 copies.
ROW_CHUNK = 2048


@dataclass(frozen=True)
class Rows:
    """Content-space cache entries of n tokens of both models.

    `entries[side, kind]` is one tensor [n, H, D] per layer.
    """

    entries: dict[tuple[str, str], tuple[Tensor, ...]]

    @property
    def count(self) -> int:
        """Number of rows n."""
        return next(iter(self.entries.values()))[0].shape[0]

    def design(self, blocks: Iterable[Block], start: int = 0, stop: int | None = None) -> Tensor:
        """Return the blocks' columns side by side, [stop - start, p] float64."""
        columns = [self.entries[b.side, b.kind][b.layer][start:stop, b.head] for b in blocks]
        return torch.cat(columns, dim=1).to(ACCUMULATE)


class Moments:
    """Second moments of several groups of blocks over the same rows."""

    def __init__(
        self, groups: tuple[Group, ...], sizes: dict[str, int], device: str = "cpu"
    ) -> None:
        """Start empty; `sizes` gives the head size D of "source" and "target"."""
        self.groups = groups
        self.sizes = sizes
        self.tensors: dict[str, Tensor] = {}
        for group in groups:
            p, q = (self._width(blocks) for blocks in (group.inputs, group.outputs))
            shapes = {
                "count": (1,),
                "input_mean": (p,),
                "output_mean": (q,),
                "gram": (p, p),
                "cross": (p, q),
                "output_square": (q,),
            }
            for name, shape in shapes.items():
                self.tensors[f"{group.name}.{name}"] = torch.zeros(
                    shape, dtype=ACCUMULATE, device=device
                )

    def _width(self, blocks: Iterable[Block]) -> int:
        return sum(self.sizes[block.side] for block in blocks)

    def _of(self, group: Group) -> dict[str, Tensor]:
        names = ("count", "input_mean", "output_mean", "gram", "cross", "output_square")
        return {name: self.tensors[f"{group.name}.{name}"] for name in names}

    @property
    def count(self) -> int:
        """Number of rows seen."""
        return int(self.tensors[f"{self.groups[0].name}.count"].item())

    def update(self, rows: Rows) -> None:
        """Add rows."""
        for start in range(0, rows.count, ROW_CHUNK):
            for group in self.groups:
                x = rows.design(group.inputs, start, start + ROW_CHUNK)
                y = rows.design(group.outputs, start, start + ROW_CHUNK)
                self._add(group, x, y)

    def _add(self, group: Group, x: Tensor, y: Tensor) -> None:
        mine = self._of(group)
        device = mine["gram"].device
        x, y = x.to(device), y.to(device)
        input_mean, output_mean = x.mean(0), y.mean(0)
        x, y = x - input_mean, y - output_mean
        mine["gram"].addmm_(x.mT, x)
        mine["cross"].addmm_(x.mT, y)
        mine["output_square"].add_((y * y).sum(0))
        _merge_means(mine, float(x.shape[0]), input_mean, output_mean)

    def merge(self, other: Moments) -> None:
        """Add what another accumulator of the same groups has seen.

        Raises:
            UsageError: The groups differ.
        """
        if (self.groups, self.sizes) != (other.groups, other.sizes):
            raise UsageError(
                "the moments cover different blocks of the caches; "
                "collect both with the same options"
            )
        for group in self.groups:
            mine, theirs = self._of(group), other._of(group)
            for name in ("gram", "cross", "output_square"):
                mine[name].add_(theirs[name])
            _merge_means(mine, theirs["count"].item(), theirs["input_mean"], theirs["output_mean"])

    def covariance(self, inputs: list[Block], outputs: list[Block]) -> Covariance:
        """Return the moments of some blocks against others.

        Raises:
            UsageError: No group records them together.
        """
        for group in self.groups:
            if set(inputs) <= set(group.inputs) and set(outputs) <= set(group.outputs):
                return self._select(group, inputs, outputs)
        raise UsageError(
            "the calibration does not record these inputs together; "
            "run `kvmap collect` again with `--heads all --joint`"
        )

    def _select(self, group: Group, inputs: list[Block], outputs: list[Block]) -> Covariance:
        mine = self._of(group)
        device = mine["gram"].device
        rows, columns = (
            self._columns(have, want).to(device)
            for have, want in ((group.inputs, inputs), (group.outputs, outputs))
        )
        return Covariance(
            count=mine["count"].item(),
            input_mean=mine["input_mean"][rows],
            output_mean=mine["output_mean"][columns],
            gram=mine["gram"][rows][:, rows],
            cross=mine["cross"][rows][:, columns],
            output_square=mine["output_square"][columns],
        )

    def _columns(self, have: tuple[Block, ...], want: list[Block]) -> Tensor:
        """Return the column numbers of some blocks of a group."""
        starts, at = {}, 0
        for block in have:
            starts[block] = at
            at += self.sizes[block.side]
        return torch.cat([torch.arange(starts[b], starts[b] + self.sizes[b.side]) for b in want])


def _merge_means(
    mine: dict[str, Tensor], count: float, input_mean: Tensor, output_mean: Tensor
) -> None:
    """Merge means and the between-batch part of the sums; the within-batch part is in already."""
    have = mine["count"].item()
    if count == 0:
        return
    total = have + count
    dx, dy = input_mean - mine["input_mean"], output_mean - mine["output_mean"]
    share = have * count / total
    mine["gram"].addr_(dx, dx, alpha=share)
    mine["cross"].addr_(dx, dy, alpha=share)
    mine["output_square"].add_(dy * dy, alpha=share)
    mine["input_mean"].add_(dx, alpha=count / total)
    mine["output_mean"].add_(dy, alpha=count / total)
    mine["count"].add_(count)
