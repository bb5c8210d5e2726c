"""Time full-size shapes from published configs alone: random weights, nothing downloaded.

Where both models and their caches fit, they are built whole. Elsewhere one layer of each is
built, timed and multiplied by the number of layers, and the map is that of a share of the
layers, with as many products per stripped layer as in the whole; the report says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kvmap import models
from kvmap.chosen import near_layers
from kvmap.columns import KINDS, first_and_middle
from kvmap.engine import compute_dtype
from kvmap.fit import Recipe, with_assignment, with_lookback
from kvmap.footprint import usual_rank
from kvmap.geometry import Geometry, Signature
from kvmap.map_options import weight_shape
from kvmap.mapping import Affine, CacheMap, LayerMap
from kvmap.models import LoadedModel
from kvmap.models.configs import load_config, parameter_count, published_config, shape_of
from kvmap.models.probe import probe_rope
from kvmap.plan import USUAL_K, free_memory

# Whole models are built where they take no more than this share of the free memory.
WHOLE_SHARE = {"cpu": 0.05, "cuda": 0.8}
FILL_ROWS = 64


def config_of(name: str, trust_remote_code: bool = False) -> Any:
    """Return a model's config: from the table of published ones, else from its files."""
    config = published_config(name)
    return config if config is not None else load_config(models.resolve(name), trust_remote_code)


def random_model(
    name: str, device: torch.device, dtype: torch.dtype, depth: int | None = None, seed: int = 0
) -> LoadedModel:
    """Build a model of a known shape with random weights and no tokenizer.

    Args:
        depth: Number of layers instead of all.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = config_of(name)
    if depth is not None:
        config.num_hidden_layers = depth
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:depth]
    with no_init_weights(), device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.tie_weights()  # which is left out together with the usual first weights
    model.requires_grad_(False)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        _fill(parameter, generator)
    rope = probe_rope(model, name)
    geometry = replace(shape_of(config), rope=rope)
    return LoadedModel(model, None, _signature(name, geometry, dtype))


def _fill(parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a weight with some random rows over and over: as good to time, and much faster."""
    if parameter.dim() < 2:
        parameter.fill_(1.0)
        return
    rows = torch.randn(
        FILL_ROWS, *parameter.shape[1:], generator=generator, device=parameter.device
    )
    rows = (rows * parameter.shape[-1] ** -0.5).to(parameter.dtype)
    for start in range(0, len(parameter), FILL_ROWS):
        part = parameter[start : start + FILL_ROWS]
        part.copy_(rows[: len(part)])


def _signature(name: str, geometry: Geometry, dtype: torch.dtype) -> Signature:
    kind = str(dtype).removeprefix("torch.")
    return Signature(name, None, "random", name, "random", "random", kind, geometry)


def deepened(loaded: LoadedModel, layers: int) -> Geometry:
    """Return the geometry of a model of which one layer was built."""
    geometry = loaded.signature.geometry
    return replace(geometry, layers=layers, rope=geometry.rope[:1] * layers)


def random_map(
    shapes: tuple[Signature, Signature], recipe: Recipe, device: torch.device, dtype: torch.dtype
) -> CacheMap:
    """Return a map of a recipe's shape with random weights."""
    source, target = (signature.geometry for signature in shapes)
    recipe = with_lookback(recipe, first_and_middle(source))
    options = with_assignment(recipe.options, source, target)
    k = min(source.layers, USUAL_K if recipe.k == "auto" else int(recipe.k))
    shape = weight_shape(options, k, source, target)
    rank = usual_rank(recipe, shape[1], len(KINDS) * shape[2])
    layers = tuple(
        None
        if index < options.exact_layers
        else _random_layer(
            near_layers(index, target.layers, source.layers, k), shape, rank, device, dtype
        )
        for index in range(target.layers)
    )
    return CacheMap(*shapes, layers, options)


def _random_layer(
    chosen: tuple[int, ...],
    shape: tuple[int, int, int],
    rank: int | None,
    device: torch.device,
    dtype: torch.dtype,
) -> LayerMap:
    """Return keys and values of weights [G, p, q]; of a rank, they share their first factor."""
    groups, p, q = shape
    draw = lambda p, q: torch.randn(groups, p, q, device=device).mul_(p**-0.5).to(dtype)  # noqa: E731
    bias = torch.zeros(groups, q, device=device, dtype=dtype)
    if rank is None:
        return LayerMap(chosen, Affine(draw(p, q), bias), Affine(draw(p, q), bias))
    first = draw(p, rank)
    return LayerMap(chosen, *(Affine(first, bias, draw(rank, q)) for _ in KINDS))


@dataclass(frozen=True)
class Share:
    """A share of a pair's layers, with as many target layers per source layer as the whole.

    Attributes:
        scale: The whole over the share.
    """

    source_layers: int
    target_layers: int
    scale: float

    @classmethod
    def of(cls, source: Geometry, target: Geometry, count: int) -> Share:
        """Take so many source layers, or all."""
        taken = min(count, source.layers)
        scale = source.layers / taken
        return cls(taken, max(1, round(target.layers / scale)), scale)


def share_map(
    whole: tuple[Signature, Signature], recipe: Recipe, device: torch.device, dtype: torch.dtype
) -> tuple[CacheMap, Share]:
    """Return a random map of a share of the layers, all of them mapped, and the share.

    Of the tokens before it reads as many layers as the whole map, the lowest of the share.
    """
    source, target = (signature.geometry for signature in whole)
    late = with_lookback(recipe, first_and_middle(source)).options.lookback_layers
    k = USUAL_K if recipe.k == "auto" else int(recipe.k)
    share = Share.of(source, target, max(k, len(late)))
    cut = [
        replace(signature, geometry=_first_layers(signature.geometry, count))
        for signature, count in zip(whole, (share.source_layers, share.target_layers), strict=True)
    ]
    options = replace(
        recipe.options,
        exact_first=False,
        native_layers=0,
        lookback_layers=tuple(range(len(late))),
    )
    return random_map(tuple(cut), replace(recipe, options=options), device, dtype), share


def _first_layers(geometry: Geometry, count: int) -> Geometry:
    return replace(geometry, layers=count, rope=geometry.rope[:count])


def fits_whole(names: tuple[str, str], tokens: int, device: torch.device, itemsize: int) -> bool:
    """Return whether both models and their caches can be built at full size."""
    needed = 0
    for name in names:
        config = config_of(name)
        needed += parameter_count(config) * itemsize
        needed += 2 * tokens * shape_of(config).kv_bytes_per_token(itemsize)
    kind = "cuda" if device.type == "cuda" else "cpu"
    return needed <= WHOLE_SHARE[kind] * free_memory(str(device))


def fast_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which a prefill is fastest here: fp32 where a CPU emulates half."""
    return compute_dtype(dtype, device.type)
