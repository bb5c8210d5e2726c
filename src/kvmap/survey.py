"""Whether two models can be paired and what that would cost, from configs and tokenizers alone."""

from __future__ import annotations

from typing import Any

from kvmap import models
from kvmap.collect_options import CollectOptions
from kvmap.collect_pair import Loading, TextOptions, require_length
from kvmap.errors import UsageError
from kvmap.fit_pair import FitRequest
from kvmap.fit_stages import ModelSize
from kvmap.geometry import Geometry
from kvmap.models.configs import load_config, shape_of
from kvmap.models.digests import template_digest, tokenizer_digest
from kvmap.models.load import load_tokenizer
from kvmap.models.probe import refuse_unsupported
from kvmap.plan_fit import map_sizes, model_size, plan_models


def survey(
    names: tuple[str, str],
    text: TextOptions,
    options: CollectOptions,
    loading: Loading,
    request: FitRequest | None = None,
) -> dict[str, Any]:
    """Return a pair's shapes, what stands against pairing it, and the size of each artifact.

    `pairable` is None where nothing stands against it but a tokenizer is not at hand. Where a
    fit goes on in two passes, `first_pass` and `second_pass` are what these take.

    Args:
        request: Of a fit, which collects what its recipe reads; `fit` is then what its stages
            take. Without one, two passes are those of the default recipe.

    Raises:
        UsageError: A model's config cannot be read, a model reads no sequences of this
            length, or two passes cannot do what is asked.
    """
    configs = [load_config(models.resolve(name), loading.trust_remote_code) for name in names]
    shapes = tuple(map(shape_of, configs))
    require_length(names, shapes, text.length)
    sizes = tuple(model_size(config, loading) for config in configs)
    problems = [
        found for config, name in zip(configs, names, strict=True) if (found := _kind(config, name))
    ]
    planned = plan_models(shapes, sizes, text, options, request)
    tokenizers = _tokenizer_problems(names, loading)
    problems += tokenizers or []
    return {
        **{
            side: _model(name, shape, size)
            for side, name, shape, size in zip(
                ("source", "target"), names, shapes, sizes, strict=True
            )
        },
        "pairable": False if problems else None if tokenizers is None else True,
        "problems": problems,
        "maps": map_sizes(shapes, sizes[0].itemsize),
        **planned,
    }


def _kind(config: Any, name: str) -> str | None:
    try:
        refuse_unsupported(config, name)
    except UsageError as error:
        return str(error)
    return None


def _tokenizer_problems(names: tuple[str, str], loading: Loading) -> list[str] | None:
    """Say how the tokenizers differ; None where one is not at hand."""
    try:
        tokenizers = [
            load_tokenizer(models.resolve(name), loading.trust_remote_code) for name in names
        ]
    except UsageError:
        return None
    if len({tokenizer_digest(tokenizer) for tokenizer in tokenizers}) > 1:
        return ["the tokenizers differ, so positions of the same text do not correspond"]
    if len({template_digest(tokenizer) for tokenizer in tokenizers}) > 1:
        return ["the chat templates differ, so the same conversation becomes different tokens"]
    return []


def _model(name: str, shape: Geometry, size: ModelSize) -> dict[str, Any]:
    return {
        "name": name,
        "model_type": shape.model_type,
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "parameters": size.parameters,
        "kv_bytes_per_token": shape.kv_bytes_per_token(size.itemsize),
    }
