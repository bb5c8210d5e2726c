"""What mapping and prefill must do at least: FLOPs and bytes, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvmap.bench.machine import Machine
from kvmap.geometry import Geometry
from kvmap.mapping import CacheMap


@dataclass(frozen=True)
class MapCost:
    """One map over T tokens: multiply-adds counted twice, and bytes read and written once each."""

    flops: float
    bytes: float

    def shares(self, seconds: float, machine: Machine) -> dict[str, Any]:
        """Return the costs and what share of the machine's peaks they came to."""
        return {
            "map_flops": self.flops,
            "map_bytes": self.bytes,
            "matmul_share": self.flops / seconds / machine.matmul_flops if seconds else None,
            "copy_share": self.bytes / seconds / machine.copy_bytes if seconds else None,
        }


def map_cost(cmap: CacheMap, tokens: int, itemsize: int) -> MapCost:
    """Return what a map must do: its products, the source's layers in, the target's out."""
    entry = 2 * tokens * itemsize
    read = len(cmap.source_layers) * cmap.source.geometry.width * entry
    written = len(cmap.layers) * cmap.target.geometry.width * entry
    held = sum(factor.numel() * factor.element_size() for factor in factors(cmap))
    products = sum(2 * factor.numel() for factor in factors(cmap))
    return MapCost(float(products) * tokens, float(read + written + held))


def factors(cmap: CacheMap) -> list[Tensor]:
    """Return what a map multiplies by, [G, p, q] each; once what keys and values share."""
    mapped = [layer.tensors() for layer in cmap.layers if layer]
    return [t for layer in mapped for name, t in layer.items() if not name.endswith("bias")]


def attention_flops(geometry: Geometry, tokens: int) -> float:
    """Return the FLOPs of causal attention over T tokens, all layers."""
    return 2.0 * geometry.layers * geometry.query_heads * geometry.head_size * tokens * tokens
