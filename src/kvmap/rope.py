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
    return Angles(positions[:, None]).undo(keys, table, _like(keys))


def rotate(content: Tensor, positions: Tensor, table: RopeTable | None) -> Tensor:
    """Return rotated keys: content keys [B, H, T, D] at positions [B, T], fp32."""
    return Angles(positions[:, None]).turn(content, table, _like(content))


def _like(keys: Tensor) -> Tensor:
    return torch.empty(keys.shape, dtype=torch.float32, device=keys.device)


class Angles:
    """The cos and sin of some positions, computed once for all layers that share a table."""

    def __init__(self, positions: Tensor) -> None:
        """Take positions of any shape that broadcasts against keys without their last dimension."""
        self.positions = positions[..., None].float()
        self.made: dict[tuple[RopeTable, bool], tuple[Tensor, Tensor]] = {}
        # To hash a table takes longer than to turn a short key: look for the object first.
        self.found: dict[tuple[int, bool], tuple[RopeTable, tuple[Tensor, Tensor]]] = {}

    def undo(self, keys: Tensor, table: RopeTable | None, out: Tensor) -> Tensor:
        """Write content keys into `out`, which shares no memory with `keys`, and return it."""
        return out.copy_(keys) if table is None else self._turn(keys, table, True, out)

    def turn(self, content: Tensor, table: RopeTable | None, out: Tensor) -> Tensor:
        """Write rotated keys into `out`, which shares no memory with `content`, and return it."""
        return out.copy_(content) if table is None else self._turn(content, table, False, out)

    def planes(self, table: RopeTable, undo: bool) -> tuple[Tensor, Tensor]:
        """Return cos and sin [..., planes], scaled, by which a turn is made or undone."""
        angles = self.positions * _frequencies(table.inverse_frequencies, self.positions.device)
        cos, sin = angles.cos(), angles.sin()
        if table.scaling != 1.0:
            scale = 1.0 / table.scaling if undo else table.scaling
            cos, sin = cos * scale, sin * scale
        return cos.contiguous(), sin.contiguous()

    def _turn(self, keys: Tensor, table: RopeTable, undo: bool, out: Tensor) -> Tensor:
        key = id(table), undo
        if key not in self.found:
            if (table, undo) not in self.made:
                self.made[table, undo] = self._factors(table, undo)
            self.found[key] = table, self.made[table, undo]  # kept alive: its id stays its own
        _turn(keys, *self.found[key][1], table, out)
        return out

    def _factors(self, table: RopeTable, undo: bool) -> tuple[Tensor, Tensor]:
        """Return what each channel and its partner in the plane are multiplied by, [..., 2n]."""
        cos, sin = self.planes(table, undo)
        signs = (sin, -sin) if undo else (-sin, sin)
        if table.layout == "half":
            return torch.cat((cos, cos), -1), torch.cat(signs, -1)
        return torch.stack((cos, cos), -1).flatten(-2), torch.stack(signs, -1).flatten(-2)


@lru_cache(maxsize=256)
def _frequencies(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _turn(keys: Tensor, own: Tensor, others: Tensor, table: RopeTable, out: Tensor) -> None:
    """Write keys times `own` plus their partners times `others`; channels beyond as they are."""
    if (out.dtype, out.device) != (torch.float32, keys.device):
        made = _like(keys)
        _turn(keys, own, others, table, made)
        out.copy_(made)
        return
    turning = own.shape[-1]
    if turning < keys.shape[-1]:
        out[..., turning:] = keys[..., turning:]
        keys, out = keys[..., :turning], out[..., :turning]
    if table.layout == "half":
        partners = keys.roll(turning // 2, -1)
    else:
        partners = keys.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    # Whole rows of the cache's own layout: several times as fast as plane by plane into `out`.
    torch.addcmul(partners.float().mul_(others), keys.float(), own, out=out)


def rotate_with_gradient(content: Tensor, positions: Tensor, table: RopeTable | None) -> Tensor:
    """Return what `rotate` does, made of operations that autograd can follow."""
    if table is None:
        return content.float()
    cos, sin = Angles(positions[:, None]).planes(table, undo=False)
    planes = len(table.inverse_frequencies)
    turning, rest = content[..., : 2 * planes].float(), content[..., 2 * planes :].float()
    if table.layout == "half":
        x, y = turning[..., :planes], turning[..., planes:]
        return torch.cat((x * cos - y * sin, y * cos + x * sin, rest), dim=-1)
    x, y = turning[..., 0::2], turning[..., 1::2]
    turned = torch.stack((x * cos - y * sin, y * cos + x * sin), dim=-1).flatten(-2)
    return torch.cat((turned, rest), dim=-1)
