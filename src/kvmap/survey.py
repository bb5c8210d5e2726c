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
from kvmap.plan_fit import model_size, plan_models

# Of a vocabulary: tokens that may be no tokenizer's, there to round up the size of a table.
PADDING, PADDING_SHARE = 512, 0.01


def survey(
    names: tuple[str, str],
    text: TextOptions,
    options: CollectOptions,
    loading: Loading,
    request: FitRequest | None = None,
) -> dict[str, Any]:
    """Return a pair's shapes, what stands against pairing it, and the size of each artifact.

    `pairable` is None where nothing stands against it but a tokenizer is not at hand. Where a
    fit goes on in two passes, `first_pass` and `second_pass` are what these take. `here` says
    whether this machine has the memory and the disk for a fit from nothing.

    Args:
        request: Of a fit, which collects what its recipe reads; `fit` is then what its stages
            take. Without one collecting alone is planned.

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
    problems += _vocabulary_problems(shapes) if tokenizers is None else tokenizers
    return {
        **{
            side: _model(name, shape, size)
            for side, name, shape, size in zip(
                ("source", "target"), names, shapes, sizes, strict=True
            )
        },
        "pairable": False if problems else None if tokenizers is None else True,
        "problems": problems,
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


def _vocabulary_problems(shapes: tuple[Geometry, Geometry]) -> list[str]:
    """Say that one tokenizer cannot serve both, where padding does not explain their sizes.

    One tokenizer's models differ by what rounds up their tables: Qwen2.5 has 151,936 or 152,064,
    Pythia 50,304 or 50,688.
    """
    small, large = sorted(shape.vocabulary for shape in shapes)
    if large - small <= max(PADDING, PADDING_SHARE * large):
        return []
    found = " and ".join(f"{shape.vocabulary:,}" for shape in shapes)
    return [f"vocabularies of {found} tokens are of different tokenizers"]


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
