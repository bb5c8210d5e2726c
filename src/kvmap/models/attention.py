"""Look at what a model's attention works on, without any map of T x T.

transformers lets a named function take the place of attention. Ours shows a visitor queries,
keys and values and hands on to the usual one; the model's own choice is put back whatever
happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvmap.models.loaded import LoadedModel

_NAME = "kvmap_visit"
# Called with the layer, queries [B, Hq, T, D], keys and values [B, H, T, D] after RoPE, and
# the scaling of the scores.
Visitor = Callable[[int, Tensor, Tensor, Tensor, float], None]


@torch.no_grad()
def visit_attention(loaded: LoadedModel, token_ids: Tensor, visitor: Visitor) -> None:
    """Run tokens [B, T] without padding and show every layer's attention to a visitor."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def show(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any):
        scaling = options.get("scaling") or query.shape[-1] ** -0.5
        visitor(module.layer_idx, query, key, value, scaling)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    usual = loaded.model.config._attn_implementation
    # Without its mask function a registered attention gets no mask at all.
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    AttentionInterface.register(_NAME, show)
    try:
        loaded.model.set_attn_implementation(_NAME)
        loaded.model(input_ids=token_ids.to(loaded.device), use_cache=False, logits_to_keep=1)
    finally:
        loaded.model.set_attn_implementation(usual)
        AttentionInterface.register(_NAME, sdpa_attention_forward)  # lets go of the visitor


def last_queries(loaded: LoadedModel, token_ids: Tensor, window: int) -> tuple[list[Tensor], float]:
    """Return each layer's queries [B, Hq, W, D] of the last tokens, after RoPE, and the scaling.

    Args:
        token_ids: [B, T] without padding.
        window: W; all T where there are fewer.
    """
    found: dict[int, Tensor] = {}
    scalings: list[float] = []

    def record(layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        found[layer] = query[:, :, -window:].detach()
        scalings.append(scaling)

    visit_attention(loaded, token_ids, record)
    return [found[layer] for layer in sorted(found)], scalings[0]
