"""The oracles and planted pairs are checked first: a wrong right answer proves nothing."""

import checkpoints
import numpy as np
import oracles
import pytest
import torch
from conftest import token_ids

HALF_SPLIT = [
    n
    for n, (_, o) in checkpoints.SUPPORTED.items()
    if "partial_rotary_factor" not in o["rope_parameters"]
]
HALF_SPLIT = [name for name in HALF_SPLIT if name not in ("cohere_interleaved", "smollm3_nope")]


@pytest.mark.parametrize("name", HALF_SPLIT)
def test_published_rope_formula_gives_the_models_own_cached_keys(native, name):
    """Transformers computes its tables in fp32: 4e-4 relative at positions up to 4,000."""
    model, ids = native(name), token_ids(2, 12)
    positions = torch.tensor([list(range(12)), list(range(4000 - 12, 4000))])
    with oracles.recording_content_keys(model) as content:
        keys, _ = oracles.native_cache(model, ids, positions)
    frequencies, scaling = oracles.rope_table(model.config.rope_parameters, model.config.head_dim)
    for layer, cached in enumerate(keys):
        expected = oracles.rotate(content[layer].numpy(), positions.numpy(), frequencies, scaling)
        error = np.abs(cached.numpy() - expected).max() / np.abs(expected).max()
        assert error < 4e-4, (layer, error)


def test_two_values_of_every_rope_parameter_give_other_tables():
    tables = {
        name: oracles.rope_table(options["rope_parameters"], options["head_dim"])
        for name, (_, options) in checkpoints.SUPPORTED.items()
        if name.startswith(("llama", "ministral"))
    }
    assert len(
        {(*tuple(frequencies[:8]), scaling) for frequencies, scaling in tables.values()}
    ) == len(tables)


@pytest.mark.parametrize("name", ["twin_llama", "twin_qwen3"])
def test_matched_twin_computes_the_same_function(plant, name):
    pair, ids = plant(name), token_ids(2, 40)
    theirs, own = oracles.native_logits(pair.source, ids), oracles.native_logits(pair.target, ids)
    assert (theirs - own).abs().max() < 1e-4
    assert theirs.std() > 0.5, "flat logits would make every comparison pass"


@pytest.mark.parametrize("name", ["twin_llama", "twin_qwen3", "image"])
def test_planted_map_gives_the_targets_own_cache(plant, name):
    """Keys are compared before rotation, as recorded in both models."""
    pair, ids = plant(name), token_ids(2, 40)
    with oracles.recording_content_keys(pair.source) as source_keys:
        _, source_values = oracles.native_cache(pair.source, ids)
    with oracles.recording_content_keys(pair.target) as target_keys:
        _, target_values = oracles.native_cache(pair.target, ids)
    for layer, of in enumerate(pair.source_layers):
        for theirs, own, weight in (
            (source_keys[of], target_keys[layer], pair.keys[layer]),
            (source_values[of], target_values[layer], pair.values[layer]),
        ):
            expected, found = oracles.rows(own), oracles.rows(theirs) @ weight.T.double().numpy()
            assert np.abs(expected - found).max() < 1e-4 * np.abs(expected).max(), layer


@pytest.mark.parametrize("name", ["twin_llama", "twin_qwen3"])
def test_untransferred_cache_does_not_give_the_targets_logits(plant, name):
    """The fixture can fail: A's own cache under B, the shapes being equal, moves the logits far."""
    from transformers import DynamicCache

    pair, ids = plant(name), token_ids(1, 40)
    keys, values = oracles.native_cache(pair.source, ids[:, :30])
    cache = DynamicCache()
    for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
        cache.update(key, value, layer)
    with torch.no_grad():
        logits = pair.target(
            input_ids=ids[:, 30:], **{oracles.cache_keyword(pair.target): cache}
        ).logits
    assert (logits - oracles.native_logits(pair.target, ids)[:, 30:]).abs().max() > 0.5


def test_noisy_image_is_linear_only_in_part(plant):
    pair, ids = plant("noisy_image"), token_ids(8, 60)
    with oracles.recording_content_keys(pair.source) as source_keys:
        oracles.native_cache(pair.source, ids)
    with oracles.recording_content_keys(pair.target) as target_keys:
        oracles.native_cache(pair.target, ids)
    inputs, outputs = oracles.rows(source_keys[1]), oracles.rows(target_keys[1])
    weight, bias = oracles.ridge(inputs, outputs, 1e-9)
    assert 0.5 < oracles.r2(outputs, inputs @ weight + bias) < 0.95


def test_ridge_oracle_finds_a_known_map():
    generator = np.random.default_rng(0)
    inputs, weight = generator.normal(size=(500, 6)) + 50, generator.normal(size=(6, 3))
    found, bias = oracles.ridge(inputs, inputs @ weight + 7, 0.0)
    np.testing.assert_allclose(found, weight, atol=1e-10)
    np.testing.assert_allclose(bias, 7, atol=1e-8)
    shrunk, _ = oracles.ridge(inputs, inputs @ weight, 1.0)
    np.testing.assert_allclose(shrunk, weight / 2, atol=0.2)
