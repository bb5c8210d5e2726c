"""Models spread over devices, each layer's cache where the layer is.

The device "meta" stands for a second one: it holds no numbers, but as any other it refuses
tensors that lie elsewhere. Numbers are compared where a model has one device, in other files.
"""

import copy
import dataclasses
import sys

import pytest
import torch
from conftest import token_ids

from kvmap import fit, plan
from kvmap.bench.run import BenchOptions, machine_of
from kvmap.collect_pair import Loading
from kvmap.errors import UsageError
from kvmap.fit import continuation
from kvmap.fit.choice import select_layers
from kvmap.fit.job import splits
from kvmap.geometry import RopeTable
from kvmap.handoff import handoff
from kvmap.models import LoadedModel, continue_logits, prefill
from kvmap.pipeline import fit_map
from kvmap.rope import Angles
from kvmap.streaming import StreamingMap

META = torch.device("meta")
CPU = torch.device("cpu")


def spread(loaded: LoadedModel) -> LoadedModel:
    """Put all layers but the first on another device, as accelerate does with its hooks."""
    model = copy.deepcopy(loaded.model)
    decoder = model.get_decoder()

    def follow(module, args, named):
        move = lambda found: (  # noqa: E731
            tuple(map(move, found))
            if isinstance(found, tuple)
            else (found.to(META) if isinstance(found, torch.Tensor) else found)
        )
        return move(args), {name: move(found) for name, found in named.items()}

    for module in (*decoder.layers[1:], decoder.norm, model.lm_head):
        module.to(META)
    for layer in decoder.layers[1:]:
        layer.register_forward_pre_hook(follow, with_kwargs=True)
    model.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": "meta"}
    return dataclasses.replace(loaded, model=model)


@pytest.fixture(scope="module")
def given(pair, calibration):
    """Return a planted pair, its target spread, and a map that reads the target's first layer."""
    source, target = pair("twin_llama")
    found = calibration("twin_llama")
    recipe = fit.recipe("kvmap")
    options = dataclasses.replace(recipe.options, native_tail=4, tail_share=1.0)
    recipe = dataclasses.replace(recipe, k=1, options=options)
    layers = select_layers(splits(found, options.native_head), recipe).layers
    openers = lambda: source, lambda: target
    return source, spread(target), fit_map(found, layers, recipe, lambda *_: None, openers).cmap


def places(cache) -> set[tuple[torch.device, ...]]:
    return {tuple(tensor.device for tensor in tensors) for tensors in (cache.keys, cache.values)}


def test_a_spread_model_says_where_each_layer_s_cache_is(given, loaded):
    source, target, _ = given
    assert target.places == (CPU, *[META] * (len(target.places) - 1))
    assert set(source.places) == {CPU}
    cache, logits = prefill(target, token_ids(1, 12))
    assert (places(cache), logits.device) == ({target.places}, META)


def test_weights_that_are_offloaded_do_not_say_where_a_layer_runs(given):
    _, target, _ = given
    other = dataclasses.replace(target, model=copy.deepcopy(target.model))
    layer = other.model.get_decoder().layers[1]
    layer._hf_hook = type("Hook", (), {"execution_device": "cpu"})
    assert other.places[:3] == (CPU, CPU, META)


def test_a_cache_of_one_device_is_taken_where_the_layers_are(given, pair):
    """What the model's own hooks leave alone: they move inputs, never a cache."""
    _, target, _ = given
    whole, _ = prefill(pair("twin_llama")[1], token_ids(1, 12))
    assert continue_logits(target, whole, token_ids(1, 3)).device == META


def test_a_handoff_fills_the_cache_where_the_layers_are(given):
    source, target, cmap = given
    ids = token_ids(1, 40)
    cache, _ = prefill(source, ids)
    made = handoff(cmap, target, cache, ids)
    assert (made.outcome, places(made.cache)) == ("applied", {target.places})
    session = StreamingMap(cmap, target)
    for start in range(0, 40, 8):
        session.append(cache.slice(start, start + 8))
    assert places(session.handoff().cache) == {target.places}


def test_a_source_s_cache_may_lie_on_several_devices(given):
    source, _, cmap = given
    cache, _ = prefill(source, token_ids(1, 12))
    apart = cache.placed((META, *[CPU] * (cache.layers - 1)))
    first = tuple(torch.empty_like(cache.keys[0], device=META) for _ in range(2))
    assert places(cmap.apply(apart, first)) == {(META,) * len(cmap.layers)}


def test_a_polish_s_loss_is_taken_where_the_layers_are(given):
    source, target, cmap = given
    made = continuation.lesson((source, target), token_ids(2, 40), 8, 4)
    with torch.no_grad():
        total, divergence = continuation.loss(cmap, target, made, 0.1)
    assert (total.device, divergence.device) == (META, META)


def test_free_memory_of_a_spread_model_is_that_of_all_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda at: (10 + at, 100))
    assert plan.free_memory("spread") == 33


def test_what_lays_models_over_devices_is_asked_for_by_name(checkpoint, monkeypatch):
    monkeypatch.setattr(sys.modules["kvmap.models.devices"], "find_spec", lambda name: None)
    with pytest.raises(
        UsageError,
        match=r"--device spread needs accelerate, .* run `pip install 'kvmap\[devices\]'`",
    ):
        Loading(device="spread").open(str(checkpoint("qwen3_small")))


def test_bench_times_one_device():
    with pytest.raises(UsageError, match="found --device spread, but bench times one device"):
        machine_of(Loading(device="spread"), BenchOptions())


def test_keys_are_turned_into_a_cache_of_another_device():
    content, table = torch.randn(1, 2, 6, 8), RopeTable((1.0, 0.1, 0.01, 0.001))
    made = Angles(torch.arange(6)[None, None]).turn(content, table, content.to(META))
    assert made.device == META
