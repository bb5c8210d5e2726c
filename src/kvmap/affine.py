"""What makes one target layer's keys or values of its inputs: y = xW + b, and what may be added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
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

    @property
    def matrix(self) -> Tensor:
        """The linear part as one weight [G, p, q], float64, its factors multiplied."""
        weight = self.weight.double()
        return weight if self.up is None else weight @ self.up.double()

    @cached_property
    def operands(self) -> tuple[Tensor, ...]:
        """Bias and factors as products take them, [q] and [p, q] of one group of heads."""
        factors = (self.weight,) if self.up is None else (self.weight, self.up)
        if len(self.weight) == 1:
            return self.bias[0], *(factor[0] for factor in factors)
        return self.bias[:, None], *factors

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return y [..., G, T, q] for inputs x [..., G, T, p], whole or in parts along p.

        Parts are not joined: autograd keeps them as they are, and not a copy for each that
        reads them.
        """
        rows = self.weight.split([x.shape[-1] for x in inputs], dim=1)
        y, *others = (x @ (w[0] if len(w) == 1 else w) for x, w in zip(inputs, rows, strict=True))
        for other in others:
            y = y + other
        if self.up is not None:
            y = y @ self.up
        y = y + self.bias[:, None]
        return y + self.bent(torch.cat(inputs, dim=-1)) if self.network else y

    def bent(self, x: Tensor) -> Tensor:
        """Return what the network adds."""
        return run(self.network, x)

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


def run(network: Sequence[Affine], x: Tensor) -> Tensor:
    """Return what the steps of a network make of inputs x [..., G, T, p], ReLU between them."""
    for at, step in enumerate(network):
        x = step(x if at == 0 else x.relu())
    return x


@dataclass(frozen=True)
class LayerMap:
    """How one target layer's keys and values come about.

    Where both have a low rank they may have one `weight`, the same tensor: then x·weight is
    computed once.
    """

    source_layers: tuple[int, ...]
    key: Affine
    value: Affine

    @property
    def shared(self) -> bool:
        """Whether keys and values have one `weight`, the first of two factors."""
        return self.key.up is not None and self.key.weight is self.value.weight

    def each(self, change: Callable[[str, Affine], Affine]) -> LayerMap:
        """Return the layer with both parts changed; `change` is told the kind too."""
        key, value = change("key", self.key), change("value", self.value)
        return replace(
            self, key=key, value=replace(value, weight=key.weight) if self.shared else value
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by the names they have in a file, a shared one as the keys'."""
        found = {f"key.{name}": tensor for name, tensor in self.key.tensors().items()}
        found |= {f"value.{name}": tensor for name, tensor in self.value.tensors().items()}
        if self.shared:
            del found["value.weight"]
        return found

    def of(self, kind: str) -> Affine:
        """Return the part that makes "key" or "value"."""
        return self.key if kind == "key" else self.value
