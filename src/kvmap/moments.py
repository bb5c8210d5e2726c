"""Running centred second moments of cache entries: mergeable, exact.

Each batch is centred on its own mean and merged with the formula of Chan, Golub and LeVeque
(1979), in float64, so that large means do not cancel. Any map over the recorded blocks can
be fitted from them without running a model again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.columns import BACK, Block, Group
from kvmap.errors import UsageError
from kvmap.ridge import Covariance

ACCUMULATE = torch.float64
# Rows multiplied at a time: bounds the copies.
ROW_CHUNK = 2048
# Of a symmetric product only the blocks on and above the diagonal are computed.
BLOCK = 512

NOT_TOGETHER = (
    "the calibration does not record these inputs together; run `kvmap collect` again with "
    "`--heads all --joint`, and without --layers or with those that the map reads"
)


@dataclass(frozen=True)
class Rows:
    """Content-space cache entries of n tokens of both models.

    `entries[side, kind]` has a tensor [n, H, D] by layer; of "back1" and so on, some layers alone.
    """

    entries: dict[tuple[str, str], dict[int, Tensor]]

    @property
    def count(self) -> int:
        """Number of rows n."""
        return len(next(iter(next(iter(self.entries.values())).values())))

    def design(
        self,
        blocks: Iterable[Block],
        start: int = 0,
        stop: int | None = None,
        dtype: torch.dtype = ACCUMULATE,
    ) -> Tensor:
        """Return the blocks' columns side by side, [stop - start, p]."""
        columns = [self.entries[b.side, b.kind][b.layer][start:stop, b.head] for b in blocks]
        return torch.cat(columns, dim=1).to(dtype)

    def pick(self, members: Tensor) -> Rows:
        """Return a copy of some rows, by their numbers."""
        return Rows(
            {
                name: {at: tensor[members] for at, tensor in layers.items()}
                for name, layers in self.entries.items()
            }
        )


class Moments:
    """Second moments of several groups of blocks over the same rows."""

    def __init__(
        self,
        groups: tuple[Group, ...],
        sizes: dict[str, int],
        device: str = "cpu",
        products: torch.dtype = ACCUMULATE,
    ) -> None:
        """Start empty.

        Args:
            sizes: Head size D by side, as `columns.head_sizes` gives it.
            products: Dtype in which a chunk of centred rows is multiplied before it is added in
                float64; float32 is several times faster and costs about six digits.
        """
        self.products = products
        self.groups = groups
        self.sizes = sizes
        self.tensors: dict[str, Tensor] = {}
        # By group and side of the regression, where each block's columns begin.
        self.starts: dict[str, tuple[dict[Block, int], dict[Block, int]]] = {}
        for group in groups:
            self.starts[group.name] = self._starts(group.inputs), self._starts(group.outputs)
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

    def _starts(self, blocks: Iterable[Block]) -> dict[Block, int]:
        starts, at = {}, 0
        for block in blocks:
            starts[block] = at
            at += self.sizes[block.side]
        return starts

    def _of(self, group: Group) -> dict[str, Tensor]:
        names = ("count", "input_mean", "output_mean", "gram", "cross", "output_square")
        return {name: self.tensors[f"{group.name}.{name}"] for name in names}

    @property
    def lookback_layers(self) -> tuple[int, ...]:
        """Layers of the tokens before that are recorded; layer 0 where none are."""
        late = {b.layer for group in self.groups for b in group.inputs if b.side == BACK[0]}
        return tuple(sorted(late)) or (0,)

    @property
    def count(self) -> int:
        """Number of rows seen."""
        return int(self.tensors[f"{self.groups[0].name}.count"].item())

    def update(self, rows: Rows, members: Tensor | None = None) -> None:
        """Add rows, or those of some numbers: `update_bytes` at most are held meanwhile."""
        kept = torch.arange(rows.count) if members is None else members
        for numbers in kept.split(ROW_CHUNK) if len(kept) else ():
            chunk = rows.pick(numbers)
            for group in self.groups:
                self._add(group, chunk)
        for group in self.groups:
            _mirror(self._of(group)["gram"])

    def _add(self, group: Group, rows: Rows) -> None:
        """Add rows, to the blocks of the Gram matrix on and above its diagonal alone."""
        mine = self._of(group)
        device = mine["gram"].device
        x, y = (
            rows.design(blocks, dtype=self.products).to(device)
            for blocks in (group.inputs, group.outputs)
        )
        input_mean, output_mean = (part.mean(0, dtype=ACCUMULATE) for part in (x, y))
        x.sub_(input_mean.to(x.dtype))
        y.sub_(output_mean.to(y.dtype))
        for start in range(0, x.shape[1], BLOCK):
            stop = start + BLOCK
            own = x[:, start:stop]
            _add_product(mine["gram"][start:stop, start:], own, x[:, start:])
            _add_product(mine["cross"][start:stop], own, y)
        mine["output_square"].add_(y.square_().sum(0, dtype=ACCUMULATE))
        _merge_means(mine, float(rows.count), input_mean, output_mean)

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
            self.add(group, other._of(group))

    def add(self, group: Group, theirs: dict[str, Tensor]) -> None:
        """Add moments of one group, by their names."""
        mine = self._of(group)
        for name in ("gram", "cross", "output_square"):
            mine[name].add_(theirs[name])
        _merge_means(mine, theirs["count"].item(), theirs["input_mean"], theirs["output_mean"])

    def pool(self, add_up: Callable[[Tensor], None]) -> None:
        """Become the moments of the rows of all processes.

        Args:
            add_up: Replaces a tensor by its sum over the processes.
        """
        for group in self.groups:
            mine = self._of(group)
            own, count = mine["count"].item(), mine["count"].clone()
            add_up(count)
            shifts = {}
            for side in ("input_mean", "output_mean"):
                mean = mine[side] * own
                add_up(mean)
                mean /= count.clamp_min(1.0)
                shifts[side] = mine[side] - mean
                mine[side].copy_(mean)
            _spread(mine, own, shifts["input_mean"], shifts["output_mean"])
            for name in ("gram", "cross", "output_square"):
                add_up(mine[name])
            mine["count"].copy_(count)

    def covariance(self, inputs: list[Block], outputs: list[Block]) -> Covariance:
        """Return the moments of some blocks against others.

        Raises:
            UsageError: No group records them together.
        """
        for group in self.groups:
            known = self.starts[group.name]
            if known[0].keys() >= set(inputs) and known[1].keys() >= set(outputs):
                return self._select(group, inputs, outputs)
        raise UsageError(NOT_TOGETHER)

    def _select(self, group: Group, inputs: list[Block], outputs: list[Block]) -> Covariance:
        mine = self._of(group)
        rows, columns = (
            self._runs(starts, wanted)
            for starts, wanted in zip(self.starts[group.name], (inputs, outputs), strict=True)
        )
        return Covariance(
            count=mine["count"].item(),
            input_mean=_taken(mine["input_mean"], rows),
            output_mean=_taken(mine["output_mean"], columns),
            gram=_taken(mine["gram"], rows, rows),
            cross=_taken(mine["cross"], rows, columns),
            output_square=_taken(mine["output_square"], columns),
        )

    def _runs(self, starts: dict[Block, int], wanted: list[Block]) -> list[tuple[int, int]]:
        """Return the ranges of columns that some blocks of a group take, neighbours as one."""
        runs: list[tuple[int, int]] = []
        for block in wanted:
            start, stop = starts[block], starts[block] + self.sizes[block.side]
            if runs and runs[-1][1] == start:
                start = runs.pop()[0]
            runs.append((start, stop))
        return runs


Runs = list[tuple[int, int]]


def _taken(tensor: Tensor, *runs: Runs) -> Tensor:
    """Return the ranges of a tensor's dimensions, joined: a view where each is one range."""
    if all(len(wanted) == 1 for wanted in runs):
        return tensor[tuple(slice(*wanted[0]) for wanted in runs)]
    made = tensor.new_empty([sum(stop - start for start, stop in wanted) for wanted in runs])
    for place in itertools.product(*(zip(wanted, _joined(wanted), strict=True) for wanted in runs)):
        made[tuple(to for _, to in place)] = tensor[tuple(slice(*run) for run, _ in place)]
    return made


def _joined(runs: Runs) -> Iterator[slice]:
    """Yield where each range lies once they are side by side."""
    at = 0
    for start, stop in runs:
        yield slice(at, at + stop - start)
        at += stop - start


def update_bytes(
    shapes: Iterable[tuple[int, int]], rows: int, width: int, products: torch.dtype = ACCUMULATE
) -> int:
    """Return the bytes that adding rows takes beside the moments and the rows themselves.

    Args:
        shapes: Inputs p and outputs q of each group.
        width: Bytes of one number of the rows.
    """
    chunk, wide = min(rows, ROW_CHUNK), products.itemsize
    # X and Y; the one made last passes in the rows' own dtype where that is another, and a
    # product that is not summed in place passes block by block.
    passing = width if width != wide else 0
    apart = 0 if products == ACCUMULATE else BLOCK * wide
    return max(
        (chunk * (wide * (p + q) + passing * q) + apart * max(p, q) for p, q in shapes), default=0
    )


def _add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Add XᵀY, in the dtype of X and Y, to float64 sums."""
    if x.dtype == total.dtype:
        total.addmm_(x.mT, y)
    else:
        total.add_(x.mT @ y)


def _mirror(gram: Tensor) -> None:
    """Copy the blocks above the diagonal of a symmetric matrix below it."""
    for start in range(0, gram.shape[0], BLOCK):
        stop = start + BLOCK
        gram[stop:, start:stop] = gram[start:stop, stop:].mT


def _merge_means(
    mine: dict[str, Tensor], count: float, input_mean: Tensor, output_mean: Tensor
) -> None:
    """Merge means and the between-batch part of the sums; the within-batch part is in already."""
    have = mine["count"].item()
    if count == 0:
        return
    total = have + count
    dx, dy = input_mean - mine["input_mean"], output_mean - mine["output_mean"]
    _spread(mine, have * count / total, dx, dy)
    mine["input_mean"].add_(dx, alpha=count / total)
    mine["output_mean"].add_(dy, alpha=count / total)
    mine["count"].add_(count)


def _spread(mine: dict[str, Tensor], share: float, dx: Tensor, dy: Tensor) -> None:
    """Add to the sums what rows gain that are centred a shift away from their own mean."""
    mine["gram"].addr_(dx, dx, alpha=share)
    mine["cross"].addr_(dx, dy, alpha=share)
    mine["output_square"].add_(dy * dy, alpha=share)
