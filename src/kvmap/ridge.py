"""Closed-form ridge regression from second moments, and its R² on any other moments.

With centred sums G = XᵀX, C = XᵀY of n rows: W = (G + λ·ḡ·I)⁻¹C, b = ȳ - x̄W, where ḡ is the
mean of G's diagonal. So λ is relative to the mean variance of the inputs and does not depend
on n or on their scale; the bias is not penalised. Everything is float64. Held-out error
follows from held-out moments alone:
‖Y - XW - b‖² = ‖Y‖² - 2⟨W, C⟩ + ⟨W, GW⟩ + n‖ȳ - x̄W - b‖² with their G, C, means.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Covariance:
    """Centred second moments of inputs X [n, p] and outputs Y [n, q], float64.

    Attributes:
        count: n.
        input_mean: [p].
        output_mean: [q].
        gram: [p, p], sum of centred xxᵀ.
        cross: [p, q], sum of centred xyᵀ.
        output_square: [q], sum of centred y².
    """

    count: float
    input_mean: Tensor
    output_mean: Tensor
    gram: Tensor
    cross: Tensor
    output_square: Tensor

    @property
    def rows_per_input(self) -> float:
        """N / p; near 1 the in-sample R² says nothing."""
        return float(self.count) / max(len(self.input_mean), 1)


def solve(covariance: Covariance, ridge: float) -> tuple[Tensor, Tensor]:
    """Return weight [p, q] and bias [q] for a relative ridge, float64.

    The system is scaled to unit diagonal first, so that channels of very different size do
    not spoil it; where it still is not positive definite, its null space is left out.
    """
    gram = covariance.gram
    penalty = ridge * gram.diagonal().mean()
    diagonal = gram.diagonal() + penalty
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    system = (gram * scale[:, None]).mul_(scale)
    system.diagonal().add_(penalty * scale * scale)
    weight = scale[:, None] * _solve_positive(system, covariance.cross * scale[:, None])
    return weight, covariance.output_mean - covariance.input_mean @ weight


def _solve_positive(system: Tensor, right: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(system)
    # A pivot near rounding error means the answer would be noise.
    if not failed and factor.diagonal().min() > 1e-7:
        return torch.cholesky_solve(right, factor)
    values, vectors = torch.linalg.eigh(system)
    cut = values.amax() * len(values) * torch.finfo(values.dtype).eps
    inverse = torch.where(values > cut, 1.0 / values.clamp_min(cut), 0.0)
    return vectors @ (inverse[:, None] * (vectors.mT @ right))


def squared_error(covariance: Covariance, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the summed squared error [q] of y ≈ xW + b on the rows behind the moments."""
    miss = covariance.output_mean - covariance.input_mean @ weight - bias
    explained = 2 * covariance.cross - covariance.gram @ weight
    return covariance.output_square - (weight * explained).sum(0) + covariance.count * miss * miss


def fitted_error(covariance: Covariance, weight: Tensor, ridge: float | Tensor) -> Tensor:
    """Return the summed squared error [q] of a solution on the rows it was solved for.

    Then GW = C - λ·ḡ·W and the means are met, so that no product with G is needed.

    Args:
        ridge: Relative λ, one or [q].
    """
    penalty = ridge * covariance.gram.diagonal().mean()
    explained = (weight * covariance.cross).sum(0) + penalty * weight.square().sum(0)
    return covariance.output_square - explained


def explained_share(error: Tensor, covariance: Covariance, head_size: int) -> Tensor:
    """Return R² per head [q / head_size] of summed squared errors [q]; 0 without variance."""
    error, total = (
        tensor.unflatten(0, (-1, head_size)).sum(-1) for tensor in (error, covariance.output_square)
    )
    return torch.where(total > 0, 1 - error / total.clamp_min(1e-300), 0.0)


def r2(covariance: Covariance, weight: Tensor, bias: Tensor, head_size: int) -> Tensor:
    """Return R² per head [q / head_size]: 1 - squared error over variance, summed over a head.

    0 where a head has no variance; may be negative on held-out rows.
    """
    return explained_share(squared_error(covariance, weight, bias), covariance, head_size)
