"""Keep fitted weights as two factors of rank r, for fewer numbers and fewer multiplications.

With C the covariance of the inputs and S the outputs' spread, one number per head, of all maps
of rank r the one nearest to W has the least ‖C^½(W - W_r)S⁻¹‖: with V the r leading eigenvectors
of S⁻¹WᵀCWS⁻¹ it is W_r = (WS⁻¹V)(VᵀS), reduced-rank regression. Where keys and values read the
same inputs, both are one W with one first factor: p·r + r·2q numbers in place of p·2q. C and S
are of the training rows; the rank may be chosen by the error on held-out ones. Source: Izenman
1975, Reduced-rank regression for the multivariate linear model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvmap.columns import KINDS
from kvmap.fit.closed_form import Splits, regressions
from kvmap.mapping import Affine, CacheMap, LayerMap
from kvmap.ridge import Covariance


def reduce_rank(cmap: CacheMap, splits: Splits, rank: float) -> CacheMap:
    """Return the map with the weights in two factors, where that makes it smaller.

    Args:
        rank: r of every layer, from 1; or, below 1, the share by which the error on held-out
            rows may grow, mean over heads and kinds: each layer has the least r that keeps it.
    """
    layers = tuple(
        layer and _reduced(layer, index, cmap, splits, rank)
        for index, layer in enumerate(cmap.layers)
    )
    return replace(cmap, layers=layers)


def _reduced(layer: LayerMap, index: int, cmap: CacheMap, splits: Splits, rank: float) -> LayerMap:
    """Return a layer whose keys and values have factors, one of them shared if inputs are."""
    found = regressions(splits, index, layer.source_layers, cmap.options)
    parts = {}
    for kinds in [KINDS] if cmap.options.joint else [(kind,) for kind in KINDS]:
        own = [layer.of(kind) for kind in kinds]
        read = [blocks for blocks in found if blocks[1][0].kind in kinds]
        train, held_out = (
            [moments.covariance(*blocks) for blocks in read]
            for moments in (splits.train, splits.held_out)
        )
        weight = torch.cat([part.weight for part in own], dim=-1)
        basis = Basis.of(weight, train, splits.target.head_size)
        r = int(rank) if rank >= 1 else basis.least_rank(held_out, rank)
        parts |= dict(zip(kinds, basis.factored(own, r), strict=True))
    return replace(layer, **parts)


@dataclass(frozen=True)
class Basis:
    """Directions of the outputs, those that W makes vary most last; all float64.

    Attributes:
        weight: W [G, p, Q], keys beside values where both are read alike.
        directions: V [G, Q, Q].
        scale: [G, Q], standard deviations along the directions; what passes between the factors
            is divided by them.
        spread: S [G, Q], the diagonal.
        input_mean: [G, p], output_mean: [G, Q], of the training rows.
    """

    weight: Tensor
    directions: Tensor
    scale: Tensor
    spread: Tensor
    input_mean: Tensor
    output_mean: Tensor

    @classmethod
    def of(cls, weight: Tensor, train: list[Covariance], head_size: int) -> Basis:
        """Find the directions for weights [G, p, Q] and the moments of each group's rows."""
        of = lambda name: torch.stack([getattr(one, name) for one in train])  # noqa: E731
        weight = weight.to(of("gram"))
        heads = of("output_square").unflatten(1, (-1, head_size)).sum(-1)
        spread = heads.clamp_min(1e-24 * heads.max()).sqrt().repeat_interleave(head_size, 1)
        scaled = weight / spread[:, None]
        count = max(train[0].count, 1.0)
        variances, directions = torch.linalg.eigh(scaled.mT @ of("gram") @ scaled / count)
        least = 1e-12 * variances[:, -1:].clamp_min(1e-12)
        scale = variances.clamp_min(least).sqrt()
        return cls(weight, directions, scale, spread, of("input_mean"), of("output_mean"))

    def least_rank(self, held_out: list[Covariance], share: float) -> int:
        """Return the least r whose error on held-out rows is at most 1 + share of the whole's.

        With A = S⁻¹CᵀWS⁻¹ and M = S⁻¹WᵀGWS⁻¹ of held-out sums, the error of rank r is that of
        rank 0 and Σ (M - 2A)ᵢᵢ over the directions kept, and the same of the means.
        """
        of = lambda name: torch.stack([getattr(one, name) for one in held_out])  # noqa: E731
        turned = (self.weight / self.spread[:, None]) @ self.directions  # [G, p, Q]
        cross = (of("cross") / self.spread[:, None]) @ self.directions
        kept = ((of("gram") @ turned) * turned).sum(1) - 2 * (cross * turned).sum(1)
        apart = ((of("output_mean") - self.output_mean) / self.spread)[:, None] @ self.directions
        moved = (of("input_mean") - self.input_mean)[:, None] @ turned
        count = torch.tensor([one.count for one in held_out]).to(kept)[:, None]
        kept += count * ((apart - moved).square() - apart.square())[:, 0]
        none = (of("output_square") / self.spread.square()).sum() + (
            count * apart[:, 0].square()
        ).sum()
        error = none + kept.sum(0).flip(0).cumsum(0)  # of r = 1 to Q
        # Where nothing is left unexplained, rounding may leave less than nothing.
        return int((error <= error[-1] + share * error[-1].abs()).nonzero()[0]) + 1

    def factored(self, parts: list[Affine], rank: int) -> list[Affine]:
        """Return the parts, whose weights side by side are W, in factors if these are smaller.

        A bias makes up for what the means of the inputs lose.
        """
        _, p, width = self.weight.shape
        if rank * (p + width) >= p * width:
            return parts
        leading, scale = self.directions[..., -rank:], self.scale[:, None, -rank:]
        down = (self.weight / self.spread[:, None]) @ leading / scale
        up = (leading * scale).mT * self.spread[:, None]
        lost = (self.input_mean[:, None] @ (self.weight - down @ up))[:, 0]
        own = down.to(parts[0].weight)
        size = width // len(parts)
        made = []
        for at, part in enumerate(parts):
            columns = slice(at * size, (at + 1) * size)
            bias = (part.bias.to(lost) + lost[:, columns]).to(part.bias)
            factor = up[..., columns].to(part.weight).contiguous()
            made.append(replace(part, weight=own, bias=bias, up=factor))
        return made
