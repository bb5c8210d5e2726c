"""Run a model over tokens with a cache: prefill, continue, generate, first layer.

transformers renamed the cache argument within version 5; `cache_keyword` finds which one a
model takes, since the wrong one is swallowed without a word.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from kvmap.cache import KVCache
from kvmap.errors import UsageError
from kvmap.models.loaded import LoadedModel


def cache_keyword(model: nn.Module) -> str:
    """Return the name under which a model's forward takes its cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def to_dynamic_cache(cache: KVCache, loaded: LoadedModel | None = None) -> Any:
    """Return a transformers DynamicCache over the same tensors, without a copy.

    Layers that the model keeps on another device are copied there.

    Raises:
        UsageError: The cache has not as many layers as the model.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if loaded is None:
        built = DynamicCache()
        built.layers.extend(DynamicLayer() for _ in cache.keys)
    else:
        _check_layers(cache, loaded)
        built = DynamicCache(config=loaded.model.config)
        cache = cache.placed(loaded.places)
    for layer, keys, values in zip(built.layers, cache.keys, cache.values, strict=True):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return built


def _check_layers(cache: KVCache, loaded: LoadedModel) -> None:
    # Counts only: where processes share a model, each holds some of the heads.
    layers = loaded.signature.geometry.layers
    if {len(cache.keys), len(cache.values)} != {layers}:
        raise UsageError(
            f"found a cache of {cache.layers} layers, expected {layers} of "
            f"{loaded.signature.name}; map it to this model first"
        )


def from_dynamic_cache(
    built: Any, positions: Tensor, token_ids: Tensor | None, mask: Tensor | None
) -> KVCache:
    """Return the tensors of a DynamicCache that covers these positions [B, T]."""
    keys = tuple(layer.keys for layer in built.layers)
    values = tuple(layer.values for layer in built.layers)
    return KVCache(keys, values, positions, token_ids, mask)


def positions_of(mask: Tensor) -> Tensor:
    """Return absolute positions [B, T] of a padding mask; padding stands at 0."""
    return (mask.long().cumsum(-1) - 1).clamp_min(0)


def prefill(
    loaded: LoadedModel,
    token_ids: Tensor,
    mask: Tensor | None = None,
    past: KVCache | None = None,
    keep_logits: int = 1,
    gradient: bool = False,
    room: KVCache | None = None,
) -> tuple[KVCache, Tensor]:
    """Run tokens [B, T] and return the cache of all tokens, those of `past` first, and logits.

    Args:
        mask: [B, T] bool, False on padding. Pads may stand on either side.
        past: What the model has read before; not modified.
        keep_logits: Number of last tokens whose logits are returned; 0 for all.
        gradient: Let autograd follow `past` through the model, as far as it does outside.
        room: A larger cache whose first tokens are those of `past`; the new ones are written
            behind them, so that nothing is copied.

    Returns:
        The cache [B, H, T_past + T, D] and logits [B, keep_logits, vocabulary].
    """
    loaded.require_layers()
    token_ids = _checked(loaded, token_ids)
    positions, masks, full_mask = _place(token_ids, mask, past)
    built = _start(loaded, past, room)
    with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
        logits = loaded.model(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=masks,
            use_cache=True,
            logits_to_keep=keep_logits,
            **{cache_keyword(loaded.model): built},
        ).logits
    if past is not None:
        positions = torch.cat((past.positions.to(positions.device), positions), dim=1)
        known = past.token_ids is not None
        token_ids = (
            torch.cat((past.token_ids.to(token_ids.device), token_ids), dim=1) if known else None
        )
    return from_dynamic_cache(built, positions, token_ids, full_mask), logits


def _checked(loaded: LoadedModel, token_ids: Tensor) -> Tensor:
    """Return token ids where the model reads them."""
    # A GPU that looks up one beyond the vocabulary fails whatever is run on it afterwards.
    loaded.require_tokens(token_ids)
    return token_ids.to(loaded.device)


def continue_logits(
    loaded: LoadedModel, cache: KVCache, token_ids: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return the logits [B, Q, vocabulary] of tokens [B, Q] that follow a cache."""
    return prefill(loaded, token_ids, mask=mask, past=cache, keep_logits=0)[1]


def _start(loaded: LoadedModel, past: KVCache | None, room: KVCache | None) -> Any:
    from transformers import DynamicCache

    if room is not None:
        from kvmap.models.room import roomy_cache

        return roomy_cache(room, past.tokens if past is not None else 0, loaded.model.config)
    if past is None:
        return DynamicCache(config=loaded.model.config)
    return to_dynamic_cache(past, loaded)


def _place(
    token_ids: Tensor, mask: Tensor | None, past: KVCache | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return positions [B, T], the attention mask over all tokens, and the mask to remember."""
    batch, tokens = token_ids.shape
    device = token_ids.device
    past_mask = past.mask if past is not None else None
    if mask is None and past_mask is None:
        start = past.positions[:, -1:].to(device) + 1 if past is not None else 0
        return (torch.arange(tokens, device=device)[None] + start).expand(batch, tokens), None, None
    mask = (
        torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask.to(device).bool()
    ).expand(batch, -1)
    if past is None:
        return positions_of(mask), mask.long(), mask
    past_mask = (
        torch.ones_like(past.positions, dtype=torch.bool) if past_mask is None else past_mask
    )
    last = past.positions.to(device).masked_fill(~past_mask.to(device), -1).amax(-1, keepdim=True)
    full = torch.cat((past_mask.to(device), mask), dim=1)
    return positions_of(mask) + last + 1, full.long(), full


@torch.no_grad()
def generate(
    loaded: LoadedModel, cache: KVCache | None, prompt_ids: Tensor, max_new_tokens: int
) -> Tensor:
    """Return up to `max_new_tokens` greedy tokens [B, N] that follow prompt_ids [B, T].

    The cache covers the prompt's first tokens and fewer than all of them: what it does not
    cover is run natively, since a cache alone gives no logits.
    """
    loaded.require_layers()
    prompt_ids = _checked(loaded, prompt_ids)
    if cache is not None and cache.tokens >= prompt_ids.shape[1]:
        cache = cache.slice(0, prompt_ids.shape[1] - 1)
    extra = {} if cache is None else {cache_keyword(loaded.model): to_dynamic_cache(cache, loaded)}
    mask = torch.ones_like(prompt_ids)
    if cache is not None and cache.mask is not None:
        mask[:, : cache.tokens] = cache.mask
    produced = loaded.model.generate(
        prompt_ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=_pad_token(loaded),
        **extra,
    )
    return produced[:, prompt_ids.shape[1] :]


def _pad_token(loaded: LoadedModel) -> int | None:
    tokenizer = loaded.tokenizer
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id


class _FirstLayer(Exception):
    """Carries layer 0's keys and values out of a forward pass that need go no further."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values


def _stop_at_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> None:
    raise _FirstLayer(key, value)


@torch.no_grad()
def first_layer(loaded: LoadedModel, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return layer 0's rotated keys and values [B, H, T, D], exact, from tokens [B, T].

    Layer 0 depends on each token alone: the pass stops where its attention would begin.
    """
    from transformers import AttentionInterface

    AttentionInterface.register("kvmap_first_layer", _stop_at_attention)
    config = loaded.model.config
    usual = config._attn_implementation
    try:
        config._attn_implementation = "kvmap_first_layer"
        loaded.model(
            input_ids=_checked(loaded, token_ids),
            position_ids=positions.to(loaded.device),
            use_cache=False,
        )
    except _FirstLayer as found:
        return found.keys, found.values
    finally:
        config._attn_implementation = usual
    raise RuntimeError(f"{type(loaded.model).__name__} did not call its attention function")


@torch.no_grad()
def lowest_layers(
    loaded: LoadedModel,
    token_ids: Tensor,
    positions: Tensor,
    count: int,
    past: KVCache | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return rotated keys and values [B, H, T, D] of layer 0, then of layer 1, ..., all exact.

    Args:
        count: Number of layers; the pass stops where the last one's attention would begin.
        past: What precedes the tokens [B, T]; not modified.
        mask: [B, T] bool, False on padding.
    """
    loaded.require_layers(count)
    if count == 1:
        return first_layer(loaded, token_ids, positions)
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def stop_at_last(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest, **named):
        if module.layer_idx == count - 1:
            raise _FirstLayer(key, value)
        return sdpa_attention_forward(module, query, key, value, *rest, **named)

    token_ids = _checked(loaded, token_ids)
    _, masks, _ = _place(token_ids, mask, past)
    built = _start(loaded, past, None)
    usual = loaded.model.config._attn_implementation
    # Without its mask function a registered attention gets no mask at all.
    AttentionMaskInterface.register("kvmap_lowest_layers", sdpa_mask)
    AttentionInterface.register("kvmap_lowest_layers", stop_at_last)
    try:
        loaded.model.set_attn_implementation("kvmap_lowest_layers")
        loaded.model(
            input_ids=token_ids,
            position_ids=positions.to(loaded.device),
            attention_mask=masks,
            use_cache=True,
            **{cache_keyword(loaded.model): built},
        )
    except _FirstLayer:
        own = slice(-token_ids.shape[1], None)
        layers = built.layers[:count]
        return tuple(t[:, :, own] for layer in layers for t in (layer.keys, layer.values))
    finally:
        loaded.model.set_attn_implementation(usual)
    raise RuntimeError(f"{type(loaded.model).__name__} did not call its attention function")
