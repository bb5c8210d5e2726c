"""Read the queries a model asks with, without any map of T x T.

transformers lets a named function take the place of attention. Ours records the last queries
and hands on to the usual one; the model's own choice is put back whatever happens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvmap.models.load import LoadedModel

_NAME = "kvmap_queries"


@torch.no_grad()
def last_queries(loaded: LoadedModel, token_ids: Tensor, window: int) -> tuple[list[Tensor], float]:
    """Return each layer's queries [B, Hq, W, D] of the last tokens, after RoPE, and the scaling.

    Args:
        token_ids: [B, T] without padding.
        window: W; all T where there are fewer.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    found: dict[int, Tensor] = {}
    scalings: list[float] = []

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any):
        found[module.layer_idx] = query[:, :, -window:].detach()
        scalings.append(options.get("scaling") or query.shape[-1] ** -0.5)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    usual = loaded.model.config._attn_implementation
    # Without its mask function a registered attention gets no mask at all.
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    AttentionInterface.register(_NAME, record)
    try:
        loaded.model.set_attn_implementation(_NAME)
        loaded.model(input_ids=token_ids.to(loaded.device), use_cache=False, logits_to_keep=1)
    finally:
        loaded.model.set_attn_implementation(usual)
        AttentionInterface.register(_NAME, sdpa_attention_forward)  # lets go of what was recorded
    return [found[layer] for layer in sorted(found)], scalings[0]
