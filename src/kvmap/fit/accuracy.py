"""How well a map predicts its calibration's rows, by layer and head: train and held out apart.

A fit knows this of the weights it solves for. What changes weights afterwards (a lower rank, a
polish) is measured again, from moments where a part is linear, else from the dumped rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvmap import ridge
from kvmap.columns import KINDS
from kvmap.fit.closed_form import FitScores, regressions_of
from kvmap.fit.job import Job
from kvmap.fit.network import DumpedRows, row_r2
from kvmap.mapping import CacheMap

SPLITS = ("train", "held_out")


def tables(scores: FitScores) -> dict[str, Tensor]:
    """Return R² [L_t, H_t] by "split.kind", float32; a layer that is computed has 1."""
    return {
        f"{split}.{kind}": getattr(scores, split)[kind].nan_to_num(1.0).float()
        for split in SPLITS
        for kind in KINDS
    }


def rounded_away(cmap: CacheMap) -> bool:
    """Return whether some R² is more than 1: moments lack the digits that so small a λ needs."""
    return any(bool((table > 1 + 1e-6).any()) for table in cmap.r2.values())


def measured(job: Job, cmap: CacheMap) -> CacheMap:
    """Return the map with R² of the weights that it has now."""
    shape = (len(cmap.layers), cmap.target.geometry.kv_heads)
    found = {f"{split}.{kind}": torch.ones(shape) for split in SPLITS for kind in KINDS}
    rows = None
    for index, layer in enumerate(cmap.layers):
        for kind in KINDS if layer else ():
            part = layer.of(kind)
            if part.network:
                rows = rows or DumpedRows(job)
                samples = rows.samples(index, layer, kind)
                values = [row_r2(part, sample, job) for sample in samples]
            else:
                values = _from_moments(job, cmap, index, kind)
            for split, value in zip(SPLITS, values, strict=True):
                found[f"{split}.{kind}"][index] = value.float()
    mapped = [index for index, layer in enumerate(cmap.layers) if layer]
    means = {
        split: {kind: float(found[f"{split}.{kind}"][mapped].mean()) for kind in KINDS}
        for split in SPLITS
    }
    return replace(cmap, r2=found, provenance=cmap.provenance | {"r2": means})


def _from_moments(job: Job, cmap: CacheMap, index: int, kind: str) -> list[Tensor]:
    """Return R² [H_t] of one layer's keys or values on the train and the held-out rows."""
    layer, size = cmap.layers[index], job.splits.target.head_size
    weight, bias = layer.of(kind).matrix, layer.of(kind).bias.double()
    own = regressions_of(job.splits, kind, index, layer.source_layers, cmap.options)
    return [
        torch.cat(
            [
                ridge.r2(moments.covariance(*blocks), weight[at], bias[at], size)
                for at, blocks in enumerate(own)
            ]
        ).cpu()
        for moments in (job.splits.train, job.splits.held_out)
    ]
