"""Every preset, on pairs whose right map is known: it must be found whatever the recipe."""

import dataclasses

import pytest
from conftest import token_ids

from kvmap import fit, pipeline
from kvmap.collect import CollectOptions, collect
from kvmap.handoff import handoff
from kvmap.models import continue_logits, prefill


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
    layers = pipeline.select_layers(
        pipeline.splits(calibration, recipe.options.native_head), recipe
    ).layers
    openers = tuple(lambda model=model: model for model in models)
    return pipeline.fit_map(calibration, layers, recipe, quiet, openers).cmap


@pytest.mark.parametrize("name", list(fit.RECIPES))
@pytest.mark.parametrize("planted", ["twin_llama", "twin_qwen3", "identity"])
def test_the_right_map_is_found_under_every_recipe(dumped, planted, name, tmp_path, monkeypatch):
    """The ridge leaves a trace: logits of size 1 agree to 1e-3."""
    monkeypatch.setenv("KVMAP_CACHE", str(tmp_path))
    (source, target), calibration = dumped(planted)
    recipe = short(name)
    recipe = dataclasses.replace(
        recipe, options=fit.with_assignment(recipe.options, *geometries(calibration))
    )
    cmap = fitted((source, target), calibration, recipe)
    ids, after = token_ids(2, 48, 9), token_ids(2, 8, 10)
    done = handoff(cmap, target, prefill(source, ids)[0], ids)
    native = prefill(target, ids)[0]
    found, truth = (continue_logits(target, cache, after) for cache in (done.cache, native))
    assert (found - truth).abs().max() < 1e-3
    raw = prefill(source, ids)[0]
    if planted != "identity":
        assert (continue_logits(target, raw, after) - truth).abs().max() > 1e-2


def geometries(calibration):
    return calibration.source.geometry, calibration.target.geometry
