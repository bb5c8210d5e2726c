"""Muon: momentum whose every step is made orthogonal, for matrices inside a network.

Jordan et al. 2024. A step U of singular values near 1 replaces the momentum M:
the quintic Newton-Schulz iteration X ← aX + (bA + cA²)X with A = XXᵀ pushes
each singular value of M/‖M‖ towards 1. Matrices of one shape go as one stack.
"""

from __future__ import annotations

import torch

QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(stack: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Bring the singular values of each matrix of a stack (N, rows, columns) near 1."""
    X = stack / (stack.norm(dim=(1, 2), keepdim=True) + 1e-7)
    tall = X.shape[1] > X.shape[2]
    X = X.mT if tall else X
    a, b, c = QUINTIC
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if tall else X


class Muon(torch.optim.Optimizer):
    """Step matrices by orthogonal updates, with Nesterov momentum and decoupled decay."""

    def __init__(self, params, lr: float = 0.02, momentum: float = 0.95, decay: float = 0.02):
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for shape, members in self._by_shape(group["params"]).items():
                looks_ahead = [self._momentum(p, group["momentum"]) for p in members]
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(members, orthogonalise(torch.stack(looks_ahead)), strict=True):
                    p.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=scale)

    def _momentum(self, p: torch.Tensor, momentum: float) -> torch.Tensor:
        mean = self.state[p].setdefault("m", torch.zeros_like(p))
        mean.lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(mean, momentum)

    @staticmethod
    def _by_shape(params: list[torch.Tensor]) -> dict[torch.Size, list[torch.Tensor]]:
        shapes: dict[torch.Size, list[torch.Tensor]] = {}
        for p in params:
            shapes.setdefault(p.shape, []).append(p)
        return shapes
