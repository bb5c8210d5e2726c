"""A model ready to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from kvmap.errors import UsageError
from kvmap.geometry import Signature


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to run, its tokenizer and its signature.

    `lowest` is how many of its lowest layers are there, None where all are.
    """

    model: nn.Module
    tokenizer: Any
    signature: Signature
    lowest: int | None = None

    @property
    def device(self) -> torch.device:
        """Device of the model's input embedding."""
        return self.model.get_input_embeddings().weight.device

    @property
    def places(self) -> tuple[torch.device, ...]:
        """Device of each layer's cache; several where the model is spread over devices."""
        if not hasattr(self.model, "hf_device_map"):
            return (self.device,) * self.signature.geometry.layers
        return tuple(map(_runs_on, self.model.get_decoder().layers))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's weights, and so of its cache."""
        return self.model.dtype

    def all_heads(self, own: Tensor) -> Tensor:
        """Return all KV heads [B, H, T, D] of what holds this process's own.

        All processes that share the model call it together; a whole tensor is returned as it is.
        """
        if own.shape[1] == self.signature.geometry.kv_heads:
            return own
        own = own.contiguous()
        parts = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, own)
        return torch.cat(parts, dim=1)

    def require_layers(self, count: int | None = None) -> None:
        """Check that so many of the lowest layers are there; all and the head if not given.

        Raises:
            UsageError: They are not.
        """
        if self.lowest is not None and (count is None or count > self.lowest):
            remedy = "load the whole model" if count is None else "make them with this map"
            raise UsageError(
                f"{self.signature.name}: found the lowest {self.lowest} of its layers alone, "
                f"expected {count or 'all'}; {remedy}"
            )

    def require_tokens(self, token_ids: Tensor) -> None:
        """Check that token ids [B, T] are of the model's vocabulary.

        Raises:
            UsageError: One is not, or they are no int64 or int32, or of another shape.
        """
        name, size = self.signature.name, self.signature.geometry.vocabulary
        if token_ids.dim() != 2:
            raise UsageError(
                f"{name}: found token ids of shape {list(token_ids.shape)}, expected "
                "[sequences, tokens]"
            )
        if token_ids.dtype not in (torch.int64, torch.int32):
            raise UsageError(f"{name}: found token ids of {token_ids.dtype}, expected int64")
        for bound in token_ids.aminmax() if token_ids.numel() else ():
            if not 0 <= (found := int(bound)) < size:
                raise UsageError(
                    f"{name}: found token id {found}, expected 0 to {size - 1}; take tokens of "
                    "this model's tokenizer"
                )

    def require_positions(
        self, count: int, what: str = "the context", remedy: str = "hand over less"
    ) -> None:
        """Check that the model reads so many positions, as `Geometry.require_positions` does."""
        self.signature.geometry.require_positions(self.signature.name, count, what, remedy)


def _runs_on(layer: nn.Module) -> torch.device:
    """Return where a layer runs; weights that are offloaded lie elsewhere until then."""
    placed = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
    return next(layer.parameters()).device if placed is None else torch.device(placed)
