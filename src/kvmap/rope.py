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
        self.positions = positions
        self.made: dict[RopeTable, tuple[Tensor, Tensor]] = {}
        # To hash a table takes longer than to turn a short key: look for the object first.
        self.found: dict[int, tuple[RopeTable, tuple[Tensor, Tensor]]] = {}

    def undo(self, keys: Tensor, table: RopeTable | None, out: Tensor) -> Tensor:
        """Write content keys into `out`, which shares no memory with `keys`, and return it."""
        if table is None:
            return out.copy_(keys)
        cos, sin = self._cos_sin(table)
        scale = 1.0 / (table.scaling * table.scaling)
        return _turn(keys, cos * scale, sin * -scale, table, out)

    def turn(self, content: Tensor, table: RopeTable | None, out: Tensor) -> Tensor:
        """Write rotated keys into `out`, which shares no memory with `content`, and return it."""
        if table is None:
            return out.copy_(content)
        return _turn(content, *self._cos_sin(table), table, out)

    def planes(self, table: RopeTable, undo: bool) -> tuple[Tensor, Tensor]:
        """Return cos and sin [..., planes] by which a kernel turns, or undoes a turn."""
        cos, sin = self._cos_sin(table)
        scale = 1.0 / (table.scaling * table.scaling) if undo else 1.0
        return (cos * scale).contiguous(), (sin * scale).contiguous()

    def _cos_sin(self, table: RopeTable) -> tuple[Tensor, Tensor]:
        """Return cos and sin [..., planes], times the attention scaling."""
        if id(table) in self.found:
            return self.found[id(table)][1]
        if table not in self.made:
            frequencies = _frequencies(table.inverse_frequencies, str(self.positions.device))
            angles = self.positions[..., None].float() * frequencies
            self.made[table] = (angles.cos() * table.scaling, angles.sin() * table.scaling)
        self.found[id(table)] = table, self.made[table]  # kept alive, so its id stays its own
        return self.made[table]


@lru_cache(maxsize=256)
def _frequencies(values: tuple[float, ...], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _turn(keys: Tensor, cos: Tensor, sin: Tensor, table: RopeTable, out: Tensor) -> Tensor:
    if out.dtype != torch.float32:
        return out.copy_(_turn(keys, cos, sin, table, _like(keys)))
    planes = len(table.inverse_frequencies)
    if table.layout == "half":
        first, second = slice(0, planes), slice(planes, 2 * planes)
    else:
        first, second = slice(0, 2 * planes, 2), slice(1, 2 * planes, 2)
    x, y = keys[..., first].float(), keys[..., second].float()
    torch.mul(x, cos, out=out[..., first]).addcmul_(y, sin, value=-1)
    torch.mul(y, cos, out=out[..., second]).addcmul_(x, sin)
    if 2 * planes < keys.shape[-1]:
        out[..., 2 * planes :] = keys[..., 2 * planes :]
    return out


def rotate_with_gradient(content: Tensor, positions: Tensor, table: RopeTable | None) -> Tensor:
    """Return what `rotate` does, made of operations that autograd can follow."""
    if table is None:
        return content.float()
    cos, sin = Angles(positions[:, None])._cos_sin(table)
    planes = len(table.inverse_frequencies)
    turning, rest = content[..., : 2 * planes].float(), content[..., 2 * planes :].float()
    if table.layout == "half":
        x, y = turning[..., :planes], turning[..., planes:]
        return torch.cat((x * cos - y * sin, y * cos + x * sin, rest), dim=-1)
    x, y = turning[..., 0::2], turning[..., 1::2]
    turned = torch.stack((x * cos - y * sin, y * cos + x * sin), dim=-1).flatten(-2)
    return torch.cat((turned, rest), dim=-1)
