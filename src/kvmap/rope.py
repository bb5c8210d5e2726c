"""Turn keys to and from their positions.

RoPE multiplies each plane (x, y) of a key at position p by m·(cos pθ, sin pθ); m is the
attention scaling of YaRN or longrope. Undoing it divides by m²(cos² + sin²) = m². Angles are
always fp32: a bf16 table loses phase at long contexts. Source: arXiv 2104.09864, 2309.00071.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kvmap.geometry import RopeTable


def strip(keys: Tensor, positions: Tensor, table: RopeTable | None) -> Tensor:
    """Return content keys: rotated keys [B, H, T, D] with their positions [B, T] undone, fp32."""
    if table is None:
        return keys.float()
    cos, sin = _cos_sin(positions, table)
    scale = 1.0 / (table.scaling * table.scaling)
    return _turn(keys, cos * scale, -sin * scale, table)


def rotate(content: Tensor, positions: Tensor, table: RopeTable | None) -> Tensor:
    """Return rotated keys: content keys [B, H, T, D] at positions [B, T], fp32."""
    if table is None:
        return content.float()
    cos, sin = _cos_sin(positions, table)
    return _turn(content, cos, sin, table)


def _cos_sin(positions: Tensor, table: RopeTable) -> tuple[Tensor, Tensor]:
    """Return cos and sin [B, 1, T, planes], times the attention scaling."""
    frequencies = _frequencies(table.inverse_frequencies, str(positions.device))
    angles = positions[:, None, :, None].float() * frequencies
    return angles.cos() * table.scaling, angles.sin() * table.scaling


@lru_cache(maxsize=256)
def _frequencies(values: tuple[float, ...], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _turn(keys: Tensor, cos: Tensor, sin: Tensor, table: RopeTable) -> Tensor:
    planes = len(table.inverse_frequencies)
    turned = torch.empty(keys.shape, dtype=torch.float32, device=keys.device)
    if table.layout == "half":
        first, second = slice(0, planes), slice(planes, 2 * planes)
    else:
        first, second = slice(0, 2 * planes, 2), slice(1, 2 * planes, 2)
    x, y = keys[..., first].float(), keys[..., second].float()
    turned[..., first] = x * cos - y * sin
    turned[..., second] = y * cos + x * sin
    turned[..., 2 * planes :] = keys[..., 2 * planes :]
    return turned
