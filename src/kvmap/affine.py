"""What makes one target layer's keys or values of its inputs: y = xW + b, and what may be added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class Affine:
    """y = xW + b, per group of heads: weight [G, p, q], bias [G, q]; G is 1 or H_t.

    Attributes:
        up: [G, r, q] where the weight has rank r and is kept as two factors: W = weight·up.
        network: Steps of a network whose output is added to y, ReLU between them.
    """

    weight: Tensor
    bias: Tensor
    up: Tensor | None = None
    network: tuple[Affine, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether weight and bias are all there is."""
        return self.up is None and not self.network

    @cached_property
    def operands(self) -> tuple[Tensor, Tensor]:
        """Bias and weight as a product takes them, [q] and [p, q] of one group of heads."""
        if len(self.weight) == 1:
            return self.bias[0], self.weight[0]
        return self.bias[:, None], self.weight

    def __call__(self, x: Tensor) -> Tensor:
        """Return y [..., G, T, q] for inputs x [..., G, T, p]."""
        y = x @ self.weight
        if self.up is not None:
            y = y @ self.up
        y = y + self.bias[:, None]
        for at, step in enumerate(self.network):
            x = step(x if at == 0 else x.relu())
        return y + x if self.network else y

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by the names they have in a file."""
        found = {"weight": self.weight, "bias": self.bias}
        if self.up is not None:
            found["up"] = self.up
        for at, step in enumerate(self.network):
            found |= {f"network.{at}.{name}": tensor for name, tensor in step.tensors().items()}
        return found

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Affine:
        """Rebuild a part from what `tensors` returns.

        Raises:
            KeyError: The weight or the bias of a step is not there.
        """
        steps = {name.split(".")[1] for name in tensors if name.startswith("network.")}
        network = [
            cls(tensors[f"network.{at}.weight"], tensors[f"network.{at}.bias"])
            for at in sorted(map(int, steps))
        ]
        return cls(tensors["weight"], tensors["bias"], tensors.get("up"), tuple(network))

    def each(self, change: Callable[[Tensor], Tensor]) -> Affine:
        """Return the part with every tensor changed."""
        return Affine.of({name: change(tensor) for name, tensor in self.tensors().items()})


@dataclass(frozen=True)
class LayerMap:
    """How one target layer's keys and values come about."""

    source_layers: tuple[int, ...]
    key: Affine
    value: Affine

    def of(self, kind: str) -> Affine:
        """Return the part that makes "key" or "value"."""
        return self.key if kind == "key" else self.value
