"""Check on sixteen tokens that a model's keys can be stripped, and learn how it turns them.

A round trip proves nothing: stripping is compared with the key the model itself had before
its rotation. Kinds of attention whose cache is not one key and value per token are refused
by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvmap.errors import UsageError
from kvmap.geometry import RopeTable
from kvmap.rope import strip

PROBE_TOKENS = 16
# Relative error of a stripped key; half precision rounds the cached key itself.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
ROTATE_NAMES = ("apply_rotary_pos_emb", "apply_rotary_emb")


def refuse_unsupported(config: Any, name: str) -> None:
    """Refuse models whose cache is not plain keys and values of full attention.

    Raises:
        UsageError: Naming the kind found.
    """
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    window = (
        getattr(config, "sliding_window", None)
        if not getattr(config, "layer_types", None)
        else None
    )
    rope = getattr(config, "rope_parameters", None) or {}
    rope_types = {rope.get("rope_type")} | {
        v.get("rope_type") for v in rope.values() if isinstance(v, dict)
    }
    reasons = {
        "multi-head latent attention (MLA)": getattr(config, "kv_lora_rank", None),
        f"layers of kind {', '.join(sorted(kinds))}": kinds,
        f"a sliding window of {window} tokens": window,
        "layers that share another layer's cache": getattr(config, "num_kv_shared_layers", 0),
        "a norm after RoPE": config.model_type.startswith("hunyuan_v1"),
        "dynamic NTK RoPE, which depends on the prompt's length": "dynamic" in rope_types,
        "longrope RoPE, which depends on the prompt's length": "longrope" in rope_types,
    }
    found = [reason for reason, present in reasons.items() if present]
    if found:
        raise UsageError(
            f"{name} ({config.model_type}) has {found[0]}; "
            "kvmap maps plain full-attention caches only"
        )


def probe_rope(model: nn.Module, name: str) -> tuple[RopeTable | None, ...]:
    """Return each layer's RoPE table, None where keys never reach the model's rotation.

    Raises:
        UsageError: A layer's stripped key is not the key before rotation; says the error.
    """
    positions = torch.arange(PROBE_TOKENS) * 7 + 5
    before, cached = _run(model, positions)
    unturned = [layer for layer in range(len(cached)) if layer not in before]
    if unturned:
        _refuse_unseen_rotation(model, positions, cached, unturned, name)
    tables = []
    for layer, keys in enumerate(cached):
        table = _match(model, before.get(layer), keys, positions, f"{name}, layer {layer}")
        tables.append(table)
    return tuple(tables)


def _refuse_unseen_rotation(
    model: nn.Module, positions: Tensor, cached: list[Tensor], layers: list[int], name: str
) -> None:
    """Refuse keys that never reach a rotation known here and yet move with their positions.

    Moving all positions by the same amount leaves keys without a position as they were.
    """
    _, moved = _run(model, positions + PROBE_TOKENS)
    for layer in layers:
        error = (moved[layer].float() - cached[layer].float()).norm() / cached[layer].float().norm()
        if not float(error) <= TOLERANCES.get(cached[layer].dtype, 1e-4):
            raise UsageError(
                f"{name}, layer {layer}: its keys depend on their positions by {float(error):.1%}, "
                "but not through a rotation that kvmap knows; not supported"
            )


def _run(model: nn.Module, positions: Tensor) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Return keys before rotation by layer, and cached keys, [1, H, T, D]."""
    from transformers import DynamicCache

    from kvmap.models.run import cache_keyword

    device = model.get_input_embeddings().weight.device
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    token_ids = (torch.arange(PROBE_TOKENS, device=device)[None] * 31 + 7) % vocabulary
    cache = DynamicCache(config=model.config)
    with recording_keys(model) as before, torch.no_grad():
        model(
            input_ids=token_ids,
            position_ids=positions[None].to(device),
            use_cache=True,
            **{cache_keyword(model): cache},
        )
    return before, [layer.keys for layer in cache.layers]


@contextmanager
def recording_keys(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Record, by layer, the keys handed to the model's own rotation while the context lasts."""
    attentions = attention_modules(model)
    if not attentions:
        kind = model.config.get_text_config(decoder=True).model_type
        raise UsageError(f"found no attention layers in a model of type {kind}; not supported")
    module = sys.modules[type(next(iter(attentions.values()))).__module__]
    names = [name for name in ROTATE_NAMES if hasattr(module, name)]
    originals = {name: getattr(module, name) for name in names}
    before: dict[int, Tensor] = {}
    current: list[int] = []

    def recorder(original):
        def rotate(query, key, *args, **kwargs):
            if isinstance(key, Tensor) and key.dim() == 4 and current:
                before[current[-1]] = key.detach()
            return original(query, key, *args, **kwargs)

        return rotate

    hooks = [
        attention.register_forward_pre_hook(lambda *_, layer=layer: current.append(layer))
        for layer, attention in attentions.items()
    ]
    try:
        for name, original in originals.items():
            setattr(module, name, recorder(original))
        yield before
    finally:
        for name, original in originals.items():
            setattr(module, name, original)
        for hook in hooks:
            hook.remove()


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """Return the modules that write keys and values, by layer."""
    found = {}
    for module in model.modules():
        if (
            isinstance(getattr(module, "layer_idx", None), int)
            and "Attention" in type(module).__name__
        ):
            found[module.layer_idx] = module
    return dict(sorted(found.items()))


def _match(
    model: nn.Module, before: Tensor | None, cached: Tensor, positions: Tensor, where: str
) -> RopeTable | None:
    if before is None:
        return None
    rotary = next((m for n, m in model.named_modules() if n.endswith("rotary_emb")), None)
    if rotary is None:
        raise UsageError(f"{where}: found no module named rotary_emb; not supported")
    frequencies = tuple(rotary.inv_freq.float().tolist())
    scaling = float(getattr(rotary, "attention_scaling", 1.0))
    errors = {}
    for layout in ("half", "interleaved"):
        table = RopeTable(frequencies, scaling, layout)
        content = strip(cached, positions[None].to(cached.device), table)
        error = (content - before.float()).norm() / before.float().norm().clamp_min(1e-30)
        errors[table] = float(error)
    table = min(errors, key=errors.get)
    if not errors[table] <= TOLERANCES.get(cached.dtype, 1e-4):
        raise UsageError(
            f"{where}: stripping RoPE misses the model's own key by "
            f"{errors[table]:.1%}; not supported"
        )
    return table
