"""Every preset, on pairs whose right map is known: it must be found whatever the recipe."""

import copy
import dataclasses

import checkpoints
import entries
import pytest
import torch
from conftest import token_ids

from kvmap import fit, pipeline
from kvmap.cli import inputs
from kvmap.collect import collect
from kvmap.collect_options import CollectOptions
from kvmap.errors import UsageError
from kvmap.handoff import handoff
from kvmap.mapping import CacheMap
from kvmap.models import continue_logits, prefill
from kvmap.models.load import wrap
from kvmap.names import resolve
from kvmap.streaming import StreamingMap


def quiet(*_):
    pass


@pytest.fixture(scope="module")
def dumped(pair, tmp_path_factory):
    """Return models and a calibration, rows kept, of a planted pair or of a model with itself."""
    made = {}

    def get(name):
        if name not in made:
            models = (pair("twin_qwen3")[0],) * 2 if name == "identity" else pair(name)
            folder = tmp_path_factory.mktemp(name) / "calibration"
            options = CollectOptions(stride=1, heads="all", joint=True, shard=16, batch=16)
            openers = tuple(lambda model=model: model for model in models)
            made[name] = models, collect(openers, token_ids(32, 64, 5), folder, options, {})
        return made[name]

    return get


def short(name):
    """Return a preset without what is long, and with a penalty that an exact answer allows."""
    preset = fit.recipe(name)
    ridge = preset.ridge if preset.ridge == "auto" else 1e-9
    return dataclasses.replace(preset, ridge=ridge, polish=min(preset.polish, 2))


def fitted(models, calibration, recipe):
    layers = pipeline.cached_layers(calibration, recipe, "top", None)[0].layers
    openers = tuple(lambda model=model: model for model in models)
    return pipeline.fit_map(calibration, layers, recipe, quiet, openers).cmap


@pytest.mark.parametrize("name", list(fit.RECIPES))
@pytest.mark.parametrize("planted", ["twin_llama", "twin_qwen3", "identity"])
def test_the_right_map_is_found_under_every_recipe(dumped, planted, name, tmp_path, monkeypatch):
    """The ridge leaves a trace: logits of size 1 agree to 1e-3."""
    monkeypatch.setenv("KVMAP_CACHE", str(tmp_path))
    (source, target), calibration = dumped(planted)
    cmap = fitted((source, target), calibration, short(name))
    ids, after = token_ids(2, 48, 9), token_ids(2, 8, 10)
    done = handoff(cmap, target, prefill(source, ids)[0], ids)
    native = prefill(target, ids)[0]
    found, truth = (continue_logits(target, cache, after) for cache in (done.cache, native))
    assert (found - truth).abs().max() < 1e-3
    raw = prefill(source, ids)[0]
    if planted != "identity":
        assert (continue_logits(target, raw, after) - truth).abs().max() > 1e-2


def test_heads_that_changed_places_are_found(pair, tmp_path, monkeypatch):
    """The target's KV heads are the source's in reverse; only the best pairing can see that."""
    monkeypatch.setenv("KVMAP_CACHE", str(tmp_path / "cache"))
    source, target = pair("twin_llama")
    crossed = copy.deepcopy(target.model)
    for layer in crossed.model.layers:
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(attention, name).weight
            weight.copy_(torch.cat(weight.chunk(2)[::-1]))
        attention.o_proj.weight.copy_(torch.cat(attention.o_proj.weight.chunk(2, 1)[::-1], 1))
    target = wrap(
        crossed, target.tokenizer, resolve(str(checkpoints.save(crossed, tmp_path / "t")))
    )
    models = (source, target)
    options = CollectOptions(stride=1, heads="all", joint=True, batch=16)
    openers = tuple(lambda model=model: model for model in models)
    calibration = collect(openers, token_ids(32, 64, 5), tmp_path / "calibration", options, {})
    made = {
        how: fitted(models, calibration, dataclasses.replace(short("kvmap-matched"), assign=how))
        for how in ("best", "ratio")
    }
    assert made["best"].options.assignment == (1, 0)
    assert made["ratio"].options.assignment == (0, 1)
    gained = [made[how].provenance["r2"]["held_out"]["value"] for how in ("best", "ratio")]
    assert gained[0] > 0.999 > gained[1]


@pytest.mark.parametrize("count", [1, 2])
def test_native_layers_are_the_targets_own(dumped, count, tmp_path, monkeypatch):
    """Behind a native head too, whose keys the lowest layers attend to."""
    monkeypatch.setenv("KVMAP_CACHE", str(tmp_path))
    (source, target), calibration = dumped("twin_qwen3")
    recipe = short("kvmap")
    options = dataclasses.replace(recipe.options, native_layers=count)
    cmap = fitted((source, target), calibration, dataclasses.replace(recipe, options=options))
    assert [layer is None for layer in cmap.layers] == [at < count for at in range(3)]
    cmap = CacheMap.load(cmap.save(tmp_path / "map"))
    ids = token_ids(2, 48, 9)
    done = handoff(cmap, target, prefill(source, ids)[0], ids)
    native = prefill(target, ids)[0]
    for layer in range(count):
        torch.testing.assert_close(done.cache.keys[layer], native.keys[layer])
        torch.testing.assert_close(done.cache.values[layer], native.values[layer])
    session = StreamingMap(cmap, target)
    whole = prefill(source, ids[:1])[0]
    for start, stop in ((0, 3), (3, 20), (20, 48)):
        session.append(whole.slice(start, stop))
    torch.testing.assert_close(session.cache.values[count - 1], native.values[count - 1][:1])


def test_heads_can_be_assigned_by_hand():
    changed = inputs.edited_recipe(
        "kvmap-matched", {}, {"assignment": inputs.numbers_or_none("1,0")}
    )
    shapes = (entries.geometry(2, 2, 4), entries.geometry(2, 2, 4))
    assert fit.with_assignment(changed.options, *shapes).assignment == (1, 0)
    assert inputs.numbers_or_none("best") is None
    for wrong in ((0,), (0, 2)):
        with pytest.raises(UsageError, match=r"expected 2 numbers from 0 to 1; give one"):
            fit.with_assignment(dataclasses.replace(changed.options, assignment=wrong), *shapes)
