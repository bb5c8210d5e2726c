"""Why keys are stripped: a map fitted on short contexts holds on long ones.

The pair's keys are linear images of each other but for a part out of reach, so R² is high and
not one. Without stripping, the fit is to the rotations of the positions it saw.
"""

import dataclasses

import oracles
import pytest
import torch
from conftest import token_ids

from kvmap.cache import KVCache
from kvmap.collect import collect
from kvmap.collect_options import CollectOptions
from kvmap.fit import Recipe
from kvmap.fit.job import splits
from kvmap.geometry import Geometry
from kvmap.mapping import CacheMap, MapOptions
from kvmap.models import LoadedModel, prefill
from kvmap.pipeline import fit_map
from kvmap.rope import strip

SHORT, LONG = 256, 4096
LAYERS = ((0,), (1,), (1,), (2,))


def unstripped(loaded: LoadedModel) -> LoadedModel:
    """Let a model pass for one without RoPE, so that nothing is stripped or turned."""
    geometry = loaded.signature.geometry
    plain = dataclasses.replace(geometry, rope=(None,) * geometry.layers)
    signature = dataclasses.replace(loaded.signature, geometry=plain)
    return dataclasses.replace(loaded, signature=signature)


@pytest.fixture(scope="module")
def fitted(pair, tmp_path_factory):
    """Return two maps fitted at 256 tokens: with and without stripping."""

    def fit(models, name: str) -> CacheMap:
        openers = tuple(lambda model=model: model for model in models)
        options = CollectOptions(stride=4, heads="all", joint=False, dump=False)
        folder = tmp_path_factory.mktemp(name) / "calibration"
        made = collect(openers, token_ids(40, SHORT), folder, options, {})
        recipe = Recipe(1, "auto", MapOptions())
        assert splits(made, 4).train.count > 2000
        return fit_map(made, LAYERS, recipe, lambda *_: None).cmap

    models = pair("noisy_image")
    return fit(models, "stripped"), fit(tuple(map(unstripped, models)), "unstripped")


@pytest.fixture(scope="module")
def scores(fitted, pair) -> dict[tuple[str, int], float]:
    """Return R² of content keys on unseen sequences, mean over layers, by map and length."""
    source, target = pair("noisy_image")
    found = {}
    for tokens, count in ((SHORT, 16), (LONG, 1)):
        ids = token_ids(count, tokens, seed=77)
        read, _ = prefill(source, ids)
        native, _ = oracles.native_cache(target.model, ids)
        for name, cmap in zip(("stripped", "unstripped"), fitted, strict=True):
            found[name, tokens] = content_r2(cmap.apply(read), native, target.signature.geometry)
    return found


def content_r2(mapped: KVCache, native: list[torch.Tensor], geometry: Geometry) -> float:
    scores = []
    for layer, table in enumerate(geometry.rope):
        found, expected = (
            oracles.rows(strip(keys, mapped.positions, table)[:, :, 4:])
            for keys in (mapped.keys[layer], native[layer])
        )
        scores.append(oracles.r2(expected, found))
    return sum(scores) / len(scores)


def test_map_fitted_at_256_tokens_holds_at_4096(scores):
    assert 0.5 < scores["stripped", SHORT] < 0.95
    assert abs(scores["stripped", LONG] - scores["stripped", SHORT]) < 0.02


def test_map_fitted_without_stripping_does_not(scores):
    """It learns something at the length it was fitted at, and loses it further out."""
    assert scores["unstripped", SHORT] > 0.1
    assert scores["unstripped", SHORT] - scores["unstripped", LONG] > 0.1
    assert scores["stripped", LONG] - scores["unstripped", LONG] > 0.2
