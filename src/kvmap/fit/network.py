"""Networks where a linear map fails, per target layer and kind, trained on the dumped rows.

`mlp` is the fallback of arXiv 2608.03893, inputs → width → ReLU → width → ReLU → outputs, but
with one network for all heads that share a regression. `residual` keeps the closed-form part
frozen and adds inputs → width → ReLU → outputs whose last step starts at zero: it can only
gain on the held-out rows, since the best epoch is kept and epoch 0 is the closed form.

Inputs and errors are scaled to unit variance in training, Adam on the mean squared error;
the scales end up in the first and the last step, so that nothing else is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch
from torch import Tensor

from kvmap import artifacts
from kvmap.affine import Affine, LayerMap, run
from kvmap.calibration import Calibration
from kvmap.columns import BACK, KINDS, Block
from kvmap.errors import UsageError
from kvmap.fit.closed_form import FitScores, regressions_of
from kvmap.fit.job import Job, Result, closed_form

EPOCHS = 20
PATIENCE = 3
BATCH = 4096
# Per epoch, so that few rows make small batches, not few steps.
LEAST_BATCHES = 16
RATE = 1e-3
WIDTHS = {"mlp": 1024, "residual": 128}


@dataclass(frozen=True)
class Sample:
    """Inputs [G, n, p] and outputs [G, n, q] of one layer's keys or values."""

    inputs: Tensor
    outputs: Tensor


def mlp(job: Job) -> Result:
    """Fit networks in place of the closed form."""
    return _networks(job, "mlp")


def residual(job: Job) -> Result:
    """Fit the closed form, then networks for what it leaves."""
    return _networks(job, "residual")


def _networks(job: Job, method: str) -> Result:
    layers, scores = closed_form(job)
    rows = DumpedRows(job)
    made = list(layers)
    for index, layer in enumerate(layers):
        if layer:
            parts = [_fitted(rows, index, layer, kind, method, scores) for kind in KINDS]
            made[index] = LayerMap(layer.source_layers, *parts)
        job.progress("networks", index + 1, len(layers))
    return tuple(made), scores


def hidden_widths(method: str, width: int | None) -> list[int]:
    """Return the widths between inputs and outputs; None stands for the method's own."""
    return [width or WIDTHS[method]] * (2 if method == "mlp" else 1)


def _fitted(
    rows: DumpedRows, index: int, layer: LayerMap, kind: str, method: str, scores: FitScores
) -> Affine:
    """Return one layer's keys or values with a network, and note how well it predicts."""
    train, held_out = rows.samples(index, layer, kind)
    part = _constant(layer.of(kind), train) if method == "mlp" else layer.of(kind)
    widths = hidden_widths(method, rows.job.recipe.width)
    sizes = (train.inputs.shape[2], *widths, -1)
    part = trained(part, (train, held_out), sizes, seed=2 * index + KINDS.index(kind))
    for split, sample in (("train", train), ("held_out", held_out)):
        getattr(scores, split)[kind][index] = row_r2(part, sample, rows.job)
    return part


def _constant(part: Affine, sample: Sample) -> Affine:
    """Return a part that gives the mean output whatever it is given."""
    return Affine(torch.zeros_like(part.weight), sample.outputs.mean(1))


def trained(
    part: Affine, samples: tuple[Sample, Sample], sizes: tuple[int, ...], seed: int
) -> Affine:
    """Return the part with a network for its error added, or alone where none helps.

    Args:
        samples: To train on, and to choose the epoch on.
        sizes: Inputs and widths of the steps; -1 stands for the outputs.
        seed: Of the first weights and the order of rows.
    """
    train = samples[0]
    mean, spread = train.inputs.mean(1, keepdim=True), train.inputs.std(1, keepdim=True)
    spread = torch.where(spread > 0, spread, 1.0)
    scale = (train.outputs - part(train.inputs)).std(1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1.0)
    ready = [
        Sample((s.inputs - mean).div_(spread), (s.outputs - part(s.inputs)).div_(scale))
        for s in samples
    ]
    generator = torch.Generator().manual_seed(seed)
    groups, outputs = train.outputs.shape[0], train.outputs.shape[2]
    steps = _start(groups, [outputs if size < 0 else size for size in sizes], generator)
    best = _descend(steps, ready, generator)
    if best is None:
        return part
    first, last = best[0], best[-1]
    first = Affine(first.weight / spread.mT, first.bias - ((mean / spread) @ first.weight)[:, 0])
    best = [first, *best[1:-1], Affine(last.weight * scale, last.bias * scale[:, 0])]
    return replace(part, network=tuple(best))


def _start(groups: int, sizes: list[int], generator: torch.Generator) -> list[Affine]:
    """Return steps of random weights, the last of zeros."""
    steps = []
    for at, (p, q) in enumerate(pairwise(sizes)):
        gain = 0.0 if at == len(sizes) - 2 else (2 / p) ** 0.5
        weight = gain * torch.randn(groups, p, q, generator=generator)
        steps.append(Affine(weight, torch.zeros(groups, q)))
    return steps


def _descend(
    steps: list[Affine], samples: list[Sample], generator: torch.Generator
) -> list[Affine] | None:
    """Return the steps of the best epoch, None where no epoch beats an output of zero."""
    train, held_out = samples
    leaves = [t.requires_grad_() for step in steps for t in (step.weight, step.bias)]
    optimizer = torch.optim.Adam(leaves, lr=RATE)
    count = train.inputs.shape[1]
    batch = max(1, min(BATCH, count // LEAST_BATCHES))
    best, least, since = None, float(held_out.outputs.square().mean()), 0
    for _ in range(EPOCHS):
        for rows in torch.randperm(count, generator=generator).split(batch):
            optimizer.zero_grad()
            found = run(steps, train.inputs[:, rows])
            (found - train.outputs[:, rows]).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            error = float((run(steps, held_out.inputs) - held_out.outputs).square().mean())
        since += 1
        if error < least:
            least, since = error, 0
            best = [step.each(lambda tensor: tensor.detach().clone()) for step in steps]
        if since >= PATIENCE:
            break
    return best


def row_r2(part: Affine, sample: Sample, job: Job) -> Tensor:
    """Return R² per target head [H_t]."""
    size = job.splits.target.head_size
    truth = sample.outputs.double()
    error = (truth - part(sample.inputs).double()).square().sum(1)
    spread = (truth - truth.mean(1, keepdim=True)).square().sum(1)
    error, spread = (t.flatten().unflatten(0, (-1, size)).sum(-1) for t in (error, spread))
    return torch.where(spread > 0, 1 - error / spread.clamp_min(1e-300), 0.0)


def _place(block: Block) -> tuple[str, str]:
    """Return which file of a shard holds a block, and the tensor's name in it."""
    if block.side in BACK:
        return "source", f"{block.side}.{block.kind}.{block.layer}"
    return block.side, f"{block.kind}.{block.layer}"


class DumpedRows:
    """The dump of a calibration, read layer by layer."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.calibration: Calibration = job.calibration
        if not self.calibration.index["shards"]:
            raise UsageError(
                f"{self.calibration.path}: networks need the rows, found moments alone; "
                "run `kvmap collect` again without --no-dump"
            )
        # Read whole once, and so checked, a shard at a time; after that tensor by tensor.
        places = [place for _, *place in self.calibration.shards()]
        position, sequence = map(torch.cat, zip(*places, strict=True))
        kept = position >= job.recipe.options.native_head
        out = self.calibration.sequences["held_out"][sequence]
        self.members = (kept & ~out, kept & out)

    def _column(self, side: str, name: str) -> Iterator[Tensor]:
        for shard in self.calibration.index["shards"]:
            path = self.calibration.path / shard[side]
            yield artifacts.open_artifact(path, "dump", verify=False).tensor(name)

    def _design(self, blocks: list[Block], members: Tensor) -> Tensor:
        """Return some rows' columns of blocks side by side, one tensor of the dump at a time."""
        columns = []
        for name, own in groupby(blocks, _place):
            read = torch.cat(list(self._column(*name)))[members].float()
            columns.append(read[:, [block.head for block in own]].flatten(1))
        return torch.cat(columns, dim=1)

    def samples(self, index: int, layer: LayerMap, kind: str) -> tuple[Sample, Sample]:
        """Return train and held-out rows of one target layer's keys or values."""
        options = self.job.recipe.options
        own = regressions_of(self.job.splits, kind, index, layer.source_layers, options)
        inputs, outputs = map(list, zip(*own, strict=True))
        return tuple(
            Sample(self._stacked(inputs, members), self._stacked(outputs, members))
            for members in self.members
        )

    def _stacked(self, groups: list[list[Block]], members: Tensor) -> Tensor:
        made = [self._design(blocks, members) for blocks in groups]
        return torch.stack(made) if len(made) > 1 else made[0][None]
