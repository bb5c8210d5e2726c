"""In which coordinates a map's weights are stepped.

The inputs of a regression have large means and nearly dependent columns, so equal steps of its
weights move the outputs by anything from nothing to everything. With mean x̄ and covariance
C = LLᵀ of the inputs, y = xW + b is y = zV + c with z = (x - x̄)L⁻ᵀ white, W = L⁻ᵀV and
b = c - x̄W. V and c are the leaves; a step of 1 is the output's own standard deviation,
over √p for V. Where p is large, C's diagonal stands for C. What lies between two factors has
variance 1 (`kvmap.fit.low_rank`), so the first is stepped as a weight with such outputs, the
second as one with such inputs. A network's tensors are leaves as they are, a step of 1 being
their root mean square.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvmap.columns import KINDS
from kvmap.fit.closed_form import Splits, regressions_of
from kvmap.mapping import Affine, CacheMap, LayerMap

# Above this many inputs a full factor costs more than it brings.
MOST_INPUTS = 4096
# Relative to the mean variance: keeps directions without variance from counting as white.
FLOOR = 1e-4

Place = tuple[int, str]
Name = tuple[int, str, str]


@dataclass(frozen=True)
class Frame:
    """One part's inputs: mean [G, p], L⁻ᵀ [G, p, p] (diagonal: [G, p, 1]), and outputs' size."""

    mean: Tensor
    whiten: Tensor
    spread: float

    def weight(self, white: Tensor) -> Tensor:
        """Return W for V."""
        return self.whiten * white if self.whiten.shape[-1] == 1 else self.whiten @ white

    def white(self, weight: Tensor) -> Tensor:
        """Return V for W."""
        if self.whiten.shape[-1] == 1:
            return weight / self.whiten
        return torch.linalg.solve_triangular(self.whiten, weight, upper=True)


@dataclass(frozen=True)
class Coordinates:
    """The frames of a map's parts by (layer, kind)."""

    frames: dict[Place, Frame]

    @classmethod
    def of(cls, cmap: CacheMap, splits: Splits) -> Coordinates:
        """Take means and covariances from the training moments."""
        frames, known = {}, {}
        for index, layer in enumerate(cmap.layers):
            for kind in KINDS if layer else ():
                own = regressions_of(splits, kind, index, layer.source_layers, cmap.options)
                found = [(tuple(inputs), outputs) for inputs, outputs in own]
                frames[index, kind] = _frame(splits, found, layer.of(kind).weight.device, known)
        return cls(frames)

    def leaves(self, cmap: CacheMap) -> dict[Name, tuple[Tensor, float]]:
        """Return each leaf with the size of a step of 1."""
        made = {}
        for (index, kind), frame in self.frames.items():
            layer = cmap.layers[index]
            part = layer.of(kind)
            place = (index, kind)
            for name, tensor in part.tensors().items():
                made[_leaf(layer, place, name)] = (tensor, _size(tensor))
            _, width, outputs = part.weight.shape
            size = frame.spread if part.up is None else 1.0
            white = frame.white(part.weight)
            made[_leaf(layer, place, "weight")] = white, size / width**0.5
            if part.up is not None:
                made[*place, "up"] = part.up, frame.spread / outputs**0.5
            centre = part.bias + _through(frame.mean, part)
            made[*place, "bias"] = centre, frame.spread
        return made

    def cmap(self, start: CacheMap, leaves: dict[Name, Tensor]) -> CacheMap:
        """Return the map that leaves stand for."""

        def part(place: Place, own: Affine) -> Affine:
            frame = self.frames[place]
            layer = start.layers[place[0]]
            made = Affine.of({name: leaves[_leaf(layer, place, name)] for name in own.tensors()})
            made = replace(made, weight=frame.weight(made.weight))
            return replace(made, bias=made.bias - _through(frame.mean, made))

        return start.each(part)


def _leaf(layer: LayerMap, place: Place, name: str) -> Name:
    """Return the name of a part's tensor; a weight that both kinds have is a leaf of the keys."""
    return (place[0], "key", name) if layer.shared and name == "weight" else (*place, name)


def _through(mean: Tensor, part: Affine) -> Tensor:
    """Return x̄W [G, q]."""
    made = mean[:, None] @ part.weight
    return (made if part.up is None else made @ part.up)[:, 0]


def _size(tensor: Tensor) -> float:
    # A tensor of zeros, as a network's last step starts, has no size of its own.
    return float(tensor.square().mean().sqrt()) or 0.01


def _frame(splits: Splits, found: list, device: torch.device, known: dict) -> Frame:
    moments = [splits.train.covariance(list(inputs), outputs) for inputs, outputs in found]
    count = max(moments[0].count, 1.0)
    read = tuple(inputs for inputs, _ in found)
    if read not in known:  # keys and values that read the same have one
        factors = [_whiten(one.gram, count).float().to(device) for one in moments]
        known[read] = torch.stack(factors) if len(factors) > 1 else factors[0][None]
    means = torch.stack([one.input_mean.float().to(device) for one in moments])
    spread = (sum(float(one.output_square.mean()) / count for one in moments) / len(moments)) ** 0.5
    return Frame(means, known[read], spread or 1.0)


def _whiten(gram: Tensor, count: float) -> Tensor:
    """Return L⁻ᵀ of a covariance with a floor, upper triangular, or its diagonal [p, 1]."""
    variance = gram.diagonal() / count
    floor = FLOOR * variance.mean().clamp_min(1e-12)
    if len(gram) > MOST_INPUTS:
        return (variance + floor).rsqrt()[:, None]
    covariance = gram / count
    covariance.diagonal().add_(floor)
    factor = torch.linalg.cholesky(covariance)
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve_triangular(factor.mT, identity, upper=True)
