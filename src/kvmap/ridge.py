"""Closed-form ridge regression from second moments, and its R² on any other moments.

With centred sums G = XᵀX, C = XᵀY of n rows: W = (G + λ·ḡ·I)⁻¹C, b = ȳ - x̄W, where ḡ is the
mean of G's diagonal. So λ is relative to the mean variance of the inputs and does not depend
on n or on their scale; the bias is not penalised. Everything is float64. Held-out error
follows from held-out moments alone:
‖Y - XW - b‖² = ‖Y‖² - 2⟨W, C⟩ + ⟨W, GW⟩ + n‖ȳ - x̄W - b‖² with their G, C, means.

All shapes may have further dimensions in front: several regressions of one shape at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Covariance:
    """Centred second moments of inputs X [n, p] and outputs Y [n, q], float64.

    Attributes:
        count: n; [N, 1] of N regressions.
        input_mean: [p].
        output_mean: [q].
        gram: [p, p], sum of centred xxᵀ.
        cross: [p, q], sum of centred xyᵀ.
        output_square: [q], sum of centred y².
    """

    count: float | Tensor
    input_mean: Tensor
    output_mean: Tensor
    gram: Tensor
    cross: Tensor
    output_square: Tensor

    @classmethod
    def stacked(cls, several: Sequence[Covariance]) -> Covariance:
        """Return the moments of N regressions of one shape in one, with N in front."""
        join = torch.stack if len(several) > 1 else lambda tensors: tensors[0][None]
        count = several[0].gram.new_tensor([[one.count] for one in several])
        names = ("input_mean", "output_mean", "gram", "cross", "output_square")
        return cls(count, *(join([getattr(one, name) for one in several]) for name in names))

    @property
    def variance(self) -> Tensor:
        """Mean ḡ of the Gram matrix's diagonal, [1]."""
        return _diagonal(self.gram).mean(-1, keepdim=True)


def solve(covariance: Covariance, ridge: float) -> tuple[Tensor, Tensor]:
    """Return weight [p, q] and bias [q] for a relative ridge, float64.

    The system is scaled to unit diagonal first, so that channels of very different size do
    not spoil it; where it still is not positive definite, its null space is left out.
    """
    gram = covariance.gram
    penalty = ridge * covariance.variance
    diagonal = _diagonal(gram) + penalty
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    system = (gram * scale[..., None]).mul_(scale[..., None, :])
    _diagonal(system).add_(penalty * scale * scale)
    weight = scale[..., None] * _solve_positive(system, covariance.cross * scale[..., None])
    return weight, covariance.output_mean - _product(covariance.input_mean, weight)


def _solve_positive(system: Tensor, right: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(system)
    # A pivot near rounding error means the answer would be noise.
    sound = (failed == 0) & (_diagonal(factor).amin(-1) > 1e-7)
    if sound.all():
        return torch.cholesky_solve(right, factor)
    if not sound.any():
        return _solve_without_null_space(system, right)
    solution = torch.cholesky_solve(right, factor)
    solution[~sound] = _solve_without_null_space(system[~sound], right[~sound])
    return solution


def _solve_without_null_space(system: Tensor, right: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(system)
    eps = torch.finfo(values.dtype).eps
    cut = values.amax(-1, keepdim=True) * values.shape[-1] * eps
    inverse = torch.where(values > cut, 1.0 / torch.maximum(values, cut), 0.0)
    return vectors @ (inverse[..., None] * (vectors.mT @ right))


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)


def _product(vector: Tensor, matrix: Tensor) -> Tensor:
    return (vector[..., None, :] @ matrix).squeeze(-2)


def squared_error(covariance: Covariance, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the summed squared error [q] of y ≈ xW + b on the rows behind the moments."""
    miss = covariance.output_mean - _product(covariance.input_mean, weight) - bias
    explained = 2 * covariance.cross - covariance.gram @ weight
    return covariance.output_square - (weight * explained).sum(-2) + covariance.count * miss * miss


def fitted_error(covariance: Covariance, weight: Tensor, ridge: float | Tensor) -> Tensor:
    """Return the summed squared error [q] of a solution on the rows it was solved for.

    Then GW = C - λ·ḡ·W and the means are met, so that no product with G is needed.

    Args:
        ridge: Relative λ, one or [q].
    """
    penalty = ridge * covariance.variance
    explained = (weight * covariance.cross).sum(-2) + penalty * weight.square().sum(-2)
    return covariance.output_square - explained


def explained_share(error: Tensor, covariance: Covariance, head_size: int) -> Tensor:
    """Return R² per head [q / head_size] of summed squared errors [q]; 0 without variance."""
    error, total = (
        tensor.unflatten(-1, (-1, head_size)).sum(-1)
        for tensor in (error, covariance.output_square)
    )
    return torch.where(total > 0, 1 - error / total.clamp_min(1e-300), 0.0)


def r2(covariance: Covariance, weight: Tensor, bias: Tensor, head_size: int) -> Tensor:
    """Return R² per head [q / head_size]: 1 - squared error over variance, summed over a head.

    0 where a head has no variance; may be negative on held-out rows.
    """
    return explained_share(squared_error(covariance, weight, bias), covariance, head_size)
