"""Whether two models can be paired and what that would cost, from configs and tokenizers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvmap import models, plan
from kvmap.collect import CollectOptions
from kvmap.errors import UsageError
from kvmap.fit import Recipe
from kvmap.geometry import Geometry
from kvmap.models.load import (
    load_config,
    load_tokenizer,
    parameter_count,
    pick_device,
    pick_dtype,
    shape_of,
    template_digest,
    tokenizer_digest,
)
from kvmap.models.probe import refuse_unsupported
from kvmap.pair import Loading, TextOptions, with_scope


def survey(
    names: tuple[str, str],
    text: TextOptions,
    options: CollectOptions,
    loading: Loading,
    recipe: Recipe | None = None,
) -> dict[str, Any]:
    """Return a pair's shapes, what stands against pairing it, and the size of each artifact.

    `pairable` is None where nothing stands against it but a tokenizer is not at hand.

    Args:
        recipe: Of a fit, which collects what it reads, if need be in two passes: `first_pass` is
            then what the first takes.

    Raises:
        UsageError: A model's config cannot be read.
    """
    configs = [load_config(models.resolve(name), loading.trust_remote_code) for name in names]
    shapes = tuple(map(shape_of, configs))
    sizes = tuple(parameter_count(config, loading.trust_remote_code) for config in configs)
    itemsize = pick_dtype(loading.dtype, pick_device(loading.device)).itemsize
    problems = [
        found for config, name in zip(configs, names, strict=True) if (found := _kind(config, name))
    ]
    kept = with_scope(options, shapes, recipe)
    said = recipe and plan.two_passes(*shapes, kept, recipe.k)
    passes = {}
    if said:
        sample = replace(text, sequences=min(plan.SAMPLE, text.sequences))
        first = collect_plan(shapes, sizes, sample, plan.sample_of(options), itemsize)
        passes = {"two_passes": said, "first_pass": first}
    tokenizers = _tokenizer_problems(names, loading)
    problems += tokenizers or []
    return {
        **{
            side: _model(name, shape, size, itemsize)
            for side, name, shape, size in zip(
                ("source", "target"), names, shapes, sizes, strict=True
            )
        },
        "pairable": False if problems else None if tokenizers is None else True,
        "problems": problems,
        "maps": map_sizes(shapes, itemsize),
        "collect": collect_plan(shapes, sizes, text, kept, itemsize),
        **passes,
    }


def map_sizes(
    shapes: tuple[Geometry, Geometry], itemsize: int, moments: int | None = None
) -> list[dict[str, Any]]:
    """Return the size of each recipe's map; a k that the source's layers cap is listed once.

    Args:
        moments: Bytes of the moments that are there already.
    """
    rows = plan.map_table(*shapes, itemsize, moments)
    return [row for index, row in enumerate(rows) if row not in rows[:index]]


def collect_plan(
    shapes: tuple[Geometry, Geometry],
    sizes: tuple[int, int],
    text: TextOptions,
    options: CollectOptions,
    itemsize: int,
) -> dict[str, Any]:
    """Return what a collection reads, keeps and takes."""
    grid = (text.sequences, text.length)
    cost = plan.collect_cost(tuple(zip(shapes, sizes, strict=True)), grid, options, itemsize)
    scope = (options.heads, options.joint, options.layers)
    moments = plan.moments_bytes(*shapes, *scope) if options.moments else 0
    return {
        "sequences": text.sequences,
        "length": text.length,
        "stride": options.stride,
        "heads": options.heads,
        "joint": options.joint,
        "dump_bytes": cost.disk_bytes - moments,
        "moments_bytes": moments,
        "too_large": plan.too_large(*shapes, options),
        "disk_bytes": cost.disk_bytes,
        "peak_bytes": cost.memory_bytes,
        "flops": cost.flops,
        "seconds": cost.seconds,
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


def _model(name: str, shape: Geometry, parameters: int, itemsize: int) -> dict[str, Any]:
    return {
        "name": name,
        "model_type": shape.model_type,
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "parameters": parameters,
        "kv_bytes_per_token": shape.kv_bytes_per_token(itemsize),
    }
