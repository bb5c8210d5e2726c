"""Second opinions, from the published formulas in float64 numpy; shares nothing with the package.

Rotary tables: Su et al. 2021 (default), Chen et al. 2023 (linear), the Llama 3.1 release (llama3),
Peng et al. 2023 with the reference implementation's ramp over dimension indices (yarn).
"""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

# --- rotary tables


def rope_table(parameters: dict, rotary_size: int) -> tuple[np.ndarray, float]:
    """Return inverse frequencies [rotary_size / 2] and the factor on cos and sin of an entry."""
    theta = parameters["rope_theta"]
    frequencies = np.array(
        [theta ** (-2 * i / rotary_size) for i in range(rotary_size // 2)], dtype=np.float64
    )
    kind = parameters["rope_type"]
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / parameters["factor"], 1.0
    if kind == "llama3":
        return np.array([_llama3(frequency, parameters) for frequency in frequencies]), 1.0
    if kind == "yarn":
        return _yarn(frequencies, parameters, rotary_size), _yarn_attention(parameters)
    raise NotImplementedError(kind)


def _llama3(frequency: float, parameters: dict) -> float:
    wavelength = 2 * math.pi / frequency
    original = parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / parameters["factor"]
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / parameters["factor"] + smooth * frequency


def _yarn(frequencies: np.ndarray, parameters: dict, size: int) -> np.ndarray:
    original, theta = parameters["original_max_position_embeddings"], parameters["rope_theta"]

    def dimension_of(rotations: float) -> float:
        """Where in 0..size/2 a plane turns `rotations` times over the original context."""
        return size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first = dimension_of(parameters.get("beta_fast") or 32.0)
    last = dimension_of(parameters.get("beta_slow") or 1.0)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    result = []
    for index, frequency in enumerate(frequencies):
        interpolated = min(max((index - first) / (last - first), 0.0), 1.0)
        result.append(
            frequency / parameters["factor"] * interpolated + frequency * (1 - interpolated)
        )
    return np.array(result)


def _yarn_attention(parameters: dict) -> float:
    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(parameters["factor"]) + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(parameters["mscale"]) / scale(parameters["mscale_all_dim"])
    return scale(1.0)


def rotate(
    content: np.ndarray,
    positions: np.ndarray,
    frequencies: np.ndarray,
    scaling: float,
    layout: str = "half",
) -> np.ndarray:
    """Rotate content [B, H, T, D] to positions [B, T] with complex numbers.

    Channels past the table pass through.
    """
    content, planes = np.asarray(content, dtype=np.float64), len(frequencies)
    if layout == "half":
        real, imaginary = np.arange(planes), np.arange(planes) + planes
    else:
        real, imaginary = 2 * np.arange(planes), 2 * np.arange(planes) + 1
    angles = np.asarray(positions, dtype=np.float64)[:, None, :, None] * frequencies
    turned = (content[..., real] + 1j * content[..., imaginary]) * scaling * np.exp(1j * angles)
    result = content.copy()
    result[..., real], result[..., imaginary] = turned.real, turned.imag
    return result


# --- native runs


def cache_keyword(model: PreTrainedModel) -> str:
    """Name the forward argument that takes a cache: it was renamed within transformers 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.no_grad()
def native_logits(model: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """Run the model on unpadded token_ids [B, T] without a cache: logits [B, T, V]."""
    return model(input_ids=token_ids, use_cache=False).logits.float()


@torch.no_grad()
def native_cache(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    positions: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Prefill with transformers alone: per layer the keys and the values [B, H, T, D] as cached."""
    cache = DynamicCache()
    model(
        input_ids=token_ids,
        position_ids=positions,
        attention_mask=mask,
        use_cache=True,
        **{cache_keyword(model): cache},
    )
    return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]


@torch.no_grad()
def native_greedy(model: PreTrainedModel, token_ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Decode greedily, running the whole sequence again for every token: no cache is involved."""
    prompt = token_ids.shape[1]
    for _ in range(new_tokens):
        token_ids = torch.cat(
            (token_ids, native_logits(model, token_ids)[:, -1:].argmax(-1)), dim=1
        )
    return token_ids[:, prompt:]


@contextmanager
def recording_content_keys(model: PreTrainedModel) -> Iterator[dict[int, torch.Tensor]]:
    """Record, per layer, the key [B, H, T, D] that the model hands to its rotation."""
    recorded, handles = {}, []
    size = model.config.num_key_value_heads

    def hook(layer: int, split: slice):
        def record(module, inputs, output):
            keys = output[..., split]
            if keys.dim() == 3:  # a projection gives [B, T, H * D], a norm over heads [B, T, H, D]
                keys = keys.unflatten(-1, (size, -1))
            recorded[layer] = keys.transpose(1, 2).detach().clone()

        return record

    for index, layer in enumerate(model.model.layers):
        attention, split = layer.self_attn, slice(None)
        module = getattr(attention, "k_norm", None) or getattr(attention, "k_proj", None)
        if module is None:  # phi3 projects queries, keys and values at once
            module, width = attention.qkv_proj, size * attention.head_dim
            start = attention.config.num_attention_heads * attention.head_dim
            split = slice(start, start + width)
        handles.append(module.register_forward_hook(hook(index, split)))
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


# --- least squares


def ridge(inputs: np.ndarray, outputs: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """Fit outputs = inputs @ weight + bias on raw rows by lstsq; the bias is not penalised.

    `penalty` is relative to the mean diagonal of the inputs' centred per-row covariance.
    """
    inputs, outputs = np.asarray(inputs, np.float64), np.asarray(outputs, np.float64)
    rows, width = inputs.shape
    input_mean, output_mean = inputs.mean(0), outputs.mean(0)
    centred = inputs - input_mean
    absolute = penalty * (centred**2).sum() / rows / width
    augmented = np.vstack((centred, math.sqrt(absolute * rows) * np.eye(width)))
    targets = np.vstack((outputs - output_mean, np.zeros((width, outputs.shape[1]))))
    weight = torch.linalg.lstsq(
        torch.from_numpy(augmented), torch.from_numpy(targets), driver="gelsd"
    ).solution.numpy()
    return weight, output_mean - input_mean @ weight


def covariance(inputs: np.ndarray, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the centred inputs' sums of products [P, P] and those with the outputs [P, Q]."""
    inputs = np.asarray(inputs, np.float64) - np.asarray(inputs, np.float64).mean(0)
    outputs = np.asarray(outputs, np.float64) - np.asarray(outputs, np.float64).mean(0)
    return inputs.T @ inputs, inputs.T @ outputs


def r2(outputs: np.ndarray, predictions: np.ndarray) -> float:
    """Return 1 - residual / variance, summed over the columns before dividing."""
    outputs, predictions = np.asarray(outputs, np.float64), np.asarray(predictions, np.float64)
    return 1 - ((outputs - predictions) ** 2).sum() / ((outputs - outputs.mean(0)) ** 2).sum()


def rows(cache: torch.Tensor) -> np.ndarray:
    """Lay keys or values [B, H, T, D] out as rows [B * T, H * D]."""
    return cache.transpose(1, 2).flatten(0, 1).flatten(1).double().numpy()
