"""Time a handoff of a pair that does not fit: one layer of each model, a share of the map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvmap.bench.clock import Clock, Round, timings
from kvmap.bench.costs import map_cost
from kvmap.bench.layers import Pair, layered_pair, prefill_seconds, products_alone
from kvmap.bench.machine import Machine
from kvmap.bench.memory import peak_bytes
from kvmap.bench.pair import BenchOptions, Context, bench_pair, random_tokens
from kvmap.bench.shapes import (
    deepened,
    fits_whole,
    random_map,
    random_model,
)
from kvmap.cache import KVCache
from kvmap.engine import allocate
from kvmap.fit import Recipe
from kvmap.models import first_layer

Progress = Callable[[str, int, int], None]


def bench_layered(
    names: tuple[str, str],
    recipe: Recipe,
    contexts: list[int],
    options: BenchOptions,
    machine: Machine,
    dtype: torch.dtype,
    progress: Progress = lambda step, done, total: None,
) -> list[Context]:
    """Measure a pair of known shapes at some lengths of context."""
    device = torch.device(machine.device)
    pair = layered_pair(names, recipe, device, dtype)
    measured = []
    for done, tokens in enumerate(contexts):
        measured.append(_bench_context(pair, tokens, options, machine))
        progress(f"{names[0]} to {names[1]}", done + 1, len(contexts))
    return measured


def _bench_context(pair: Pair, tokens: int, options: BenchOptions, machine: Machine) -> Context:
    inputs = _Inputs.of(pair, tokens, options.seed)
    clock = Clock(pair.target.device, options.cpu_time)
    parts = timings(lambda: _round(pair, inputs, clock), options.budget, options.repeats)
    extra = peak_bytes(partial(_map, pair, inputs), clock.device)
    cost = map_cost(pair.cmap, inputs.cache.tokens, pair.dtype.itemsize)
    whole = replace(cost, flops=cost.flops * pair.share.scale, bytes=cost.bytes * pair.share.scale)
    target = deepened(pair.target, pair.depths[1])
    record = {
        "source": pair.source.signature.name,
        "target": pair.target.signature.name,
        "prefill": f"one layer × {pair.depths[0]} and × {pair.depths[1]}, "
        f"{str(pair.target.dtype).removeprefix('torch.')}",
        "mapped": f"{pair.share.target_layers} of {pair.depths[1]} layers from "
        f"{pair.share.source_layers} of {pair.depths[0]}, × {pair.share.scale:g}",
        "products_seconds": parts["products"].median,
        "products_share": parts["products"].median / parts["map"].median,
        **whole.shares(parts["map"].median, machine),
    }
    held = tokens * target.kv_bytes_per_token(pair.dtype.itemsize)
    return Context(tokens, parts, extra + held, extra, record)


@dataclass(frozen=True)
class _Inputs:
    """What a round works on: tokens, the source's cache of a share of layers, room for the map."""

    token_ids: torch.Tensor
    cache: KVCache
    out: KVCache
    first: tuple[torch.Tensor, torch.Tensor] | None
    head: int
    tail: int

    @classmethod
    def of(cls, pair: Pair, tokens: int, seed: int) -> _Inputs:
        options = pair.cmap.options
        tail = options.tail_length(tokens)
        head = min(options.native_head, tokens - tail)
        token_ids = random_tokens((pair.source, pair.target), tokens, seed)
        cache = _random_cache(pair, tokens - tail - head)
        out = allocate(pair.cmap.target.geometry, cache)
        first = (out.keys[0].clone().normal_(), out.values[0].clone().normal_())
        return cls(token_ids, cache, out, first if options.anchor else None, head, tail)


def _random_cache(pair: Pair, tokens: int) -> KVCache:
    source = pair.cmap.source.geometry
    shape = (1, source.kv_heads, tokens, source.head_size)
    device = pair.source.device
    make = lambda: torch.randn(shape, device=device).to(pair.dtype)  # noqa: E731
    keys, values = (tuple(make() for _ in range(source.layers)) for _ in range(2))
    return KVCache(keys, values, torch.arange(tokens, device=device)[None])


def _map(pair: Pair, inputs: _Inputs) -> None:
    pair.cmap.apply(inputs.cache, inputs.first, inputs.out)


def _round(pair: Pair, inputs: _Inputs, clock: Clock) -> Round:
    """Time every part and multiply it up to the whole pair."""
    scale = pair.share.scale
    source, _ = prefill_seconds(pair.source, inputs.token_ids, pair.depths[0], clock)
    mapped = clock.timed(partial(_map, pair, inputs))[1] * scale
    products = products_alone(pair.cmap, inputs.cache.tokens, clock) * scale
    target, past = prefill_seconds(pair.target, inputs.token_ids, pair.depths[1], clock)
    first_token = _first_token_seconds(pair, inputs, past, clock)
    return {
        "source_prefill": source,
        "map": mapped,
        "products": products,
        "build": 0.0,
        "first_token": first_token,
        "handoff": mapped + first_token,
        "target_prefill": target,
    }


def _first_token_seconds(pair: Pair, inputs: _Inputs, past: KVCache, clock: Clock) -> float:
    """Return the seconds of exact head, first layer, and tail over the mapped cache."""
    depth, start = pair.depths[1], inputs.token_ids.shape[1] - inputs.tail
    total = 0.0
    if inputs.head:
        head = inputs.token_ids[:, : inputs.head]
        total += prefill_seconds(pair.target, head, depth, clock)[0]
    if pair.cmap.needs_target:
        middle = inputs.token_ids[:, inputs.head : start]
        positions = torch.arange(middle.shape[1], device=middle.device)[None]
        total += clock.timed(partial(first_layer, pair.target, middle, positions))[1]
    tail, before = inputs.token_ids[:, start:], past.slice(0, start)
    return total + prefill_seconds(pair.target, tail, depth, clock, before)[0]


def bench_random(
    names: tuple[str, str],
    recipe: Recipe,
    contexts: list[int],
    options: BenchOptions,
    machine: Machine,
    dtype: torch.dtype,
    progress: Progress = lambda step, done, total: None,
) -> list[Context]:
    """Measure a pair of known shapes: whole where both models fit, else layer by layer."""
    device = torch.device(machine.device)
    if not fits_whole(names, max(contexts), device, dtype.itemsize):
        return bench_layered(names, recipe, contexts, options, machine, dtype, progress)
    source, target = (random_model(name, device, dtype) for name in names)
    cmap = random_map((source.signature, target.signature), recipe, device, dtype)
    return bench_pair(cmap, source, target, contexts, options, machine, progress)
