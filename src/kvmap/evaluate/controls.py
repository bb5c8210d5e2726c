"""A map that knows nothing: the same spectrum and output moments, other directions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvmap.cache import KVCache
from kvmap.columns import KINDS
from kvmap.handoff import map_middle
from kvmap.mapping import Affine, CacheMap
from kvmap.models import LoadedModel
from kvmap.rope import strip


def random_map(cmap: CacheMap, seed: int) -> CacheMap:
    """Return a map whose weights have the same singular values in random directions.

    Inputs are shuffled with random signs, outputs turned by a random orthogonal matrix: both
    leave singular values alone and cost far less than a decomposition. Biases are kept.
    """
    generator = torch.Generator().manual_seed(seed)
    return cmap.each(lambda _, part: scramble(part, generator))


def scramble(part: Affine, generator: torch.Generator) -> Affine:
    """Return a part with its inputs shuffled and signed and its outputs turned at random."""
    groups, p, _ = part.weight.shape
    q = part.bias.shape[-1]
    order = torch.stack([torch.randperm(p, generator=generator) for _ in range(groups)])
    signs = torch.randint(0, 2, (groups, p, 1), generator=generator) * 2.0 - 1.0
    turn = torch.linalg.qr(torch.randn(groups, q, q, generator=generator, dtype=torch.float64)).Q

    def shuffled(weight: Tensor) -> Tensor:
        rows = order.to(weight.device)[:, :, None].expand_as(weight)
        return weight.gather(1, rows) * signs.to(weight)

    turned = _after(_before(part, shuffled), lambda weight: weight @ turn.to(weight))
    return replace(turned, bias=part.bias)


def _before(part: Affine, change: Callable[[Tensor], Tensor]) -> Affine:
    """Return a part whose weights on the inputs are changed: [G, p, *]."""
    network = part.network
    if network:
        network = (replace(network[0], weight=change(network[0].weight)), *network[1:])
    return replace(part, weight=change(part.weight), network=network)


def _after(part: Affine, change: Callable[[Tensor], Tensor]) -> Affine:
    """Return a part followed by a linear map of its outputs: tensors [G, *, q]."""
    biased = lambda step: change(step.bias[:, None])[:, 0]  # noqa: E731
    network = part.network
    if network:
        last = replace(network[-1], weight=change(network[-1].weight), bias=biased(network[-1]))
        network = (*network[:-1], last)
    factor = "weight" if part.up is None else "up"
    changed = {factor: change(getattr(part, factor))}
    return replace(part, bias=biased(part), network=network, **changed)


def match_moments(cmap: CacheMap, other: CacheMap, target: LoadedModel, cache: KVCache) -> CacheMap:
    """Return `other` with the mean of each output, and the variance over all, that `cmap` has."""
    wanted, found = (output_moments(m, target, cache) for m in (cmap, other))

    def matched(at: tuple[int, str], part: Affine) -> Affine:
        (mean, spread), (other_mean, other_spread) = wanted[at], found[at]
        scale = spread / other_spread.clamp_min(1e-12)
        shift = (mean - scale * other_mean).reshape(part.bias.shape)
        scaled = _after(part, lambda tensor: tensor * scale)
        return replace(scaled, bias=scaled.bias + shift)

    return other.each(matched)


def output_moments(
    cmap: CacheMap, target: LoadedModel, cache: KVCache
) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    """Return by (layer, kind) the mean [H, D] and the standard deviation over all channels."""
    made = map_middle(cmap, target, cache)
    moments = {}
    for layer, table in enumerate(cmap.target.geometry.rope):
        content = {"key": strip(made.keys[layer], made.positions, table)}
        content["value"] = made.values[layer].float()
        for kind in KINDS:
            rows = content[kind].transpose(1, 2).flatten(0, 1)  # [T, H, D]
            spread = rows.var(0, correction=0).mean().sqrt()
            moments[layer, kind] = rows.mean(0), spread
    return moments
