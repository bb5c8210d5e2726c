"""Diagnostics on planted pairs and on constructed errors."""

from dataclasses import replace

import measured
import pytest
import torch

from kvmap.evaluate import arms, diagnostics
from kvmap.mapping import LayerMap
from kvmap.models import prefill
from kvmap.models.attention import last_queries

CONTEXTS = measured.contexts(3, 80)


@pytest.fixture(scope="module")
def twin():
    return measured.twin()


def test_attention_from_captured_queries_is_the_models_own(twin):
    """The last layer's captured attention, through o_proj, equals what the model adds."""
    target = twin[2]
    ids = torch.tensor([CONTEXTS[0]])
    seen = []
    hook = target.model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    try:
        cache = prefill(target, ids)[0]
    finally:
        hook.remove()
    queries, scaling = last_queries(target, ids, 16)
    output, weights = diagnostics.attend(
        queries[1][0], cache.keys[1][0], cache.values[1][0], scaling
    )
    assert torch.allclose(output.transpose(0, 1).flatten(1), seen[0][0, -16:], atol=1e-5)
    assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:2]), atol=1e-5)


def test_attention_implementation_is_restored_even_after_a_failure(twin, monkeypatch):
    target = twin[2]
    usual = target.model.config._attn_implementation
    last_queries(target, torch.tensor([CONTEXTS[0]]), 4)
    assert target.model.config._attn_implementation == usual
    with pytest.raises((RuntimeError, IndexError)):
        last_queries(target, torch.tensor([[10_000]]), 4)
    assert target.model.config._attn_implementation == usual


def test_right_map_scores_one_everywhere(twin):
    cmap, source, target = twin
    found = diagnostics.diagnose(arms.make_pair(cmap, source, target, CONTEXTS[0]), CONTEXTS)
    assert found.cosine.shape == (3, 4)
    assert found.cosine.min() > 1 - 1e-5
    assert found.key_r2.min() > 1 - 1e-5
    assert found.value_r2.min() > 1 - 1e-5
    assert found.first_error.max() < 1e-4


@pytest.mark.parametrize("broken", [0, 2])
def test_layer_with_shuffled_values_is_named(twin, broken):
    cmap, source, target = twin
    value = cmap.layers[broken].value
    order = torch.randperm(value.weight.shape[2], generator=torch.Generator().manual_seed(0))
    shuffled = replace(value, weight=value.weight[:, :, order])
    layers = list(cmap.layers)
    layers[broken] = LayerMap(layers[broken].source_layers, layers[broken].key, shuffled)
    pair = arms.make_pair(replace(cmap, layers=tuple(layers)), source, target, CONTEXTS[0])
    found = diagnostics.diagnose(pair, CONTEXTS)
    assert found.worst_layer == broken
    assert found.worst_head[0] == broken
    assert found.value_r2[broken].max() < 0.5
    assert found.value_r2[1].min() > 0.99
    assert found.key_r2[broken].min() > 0.99


def test_key_concentration_is_high_along_the_queries_and_low_across():
    """All queries along one axis: error there counts D-fold, error elsewhere not at all."""
    queries = torch.zeros(2, 5, 4)
    queries[..., 0] = 1
    along, across = torch.zeros(1, 6, 4), torch.zeros(1, 6, 4)
    along[..., 0], across[..., 1] = 1, 1
    assert diagnostics.key_concentration(queries, along).item() == pytest.approx(4)
    assert diagnostics.key_concentration(queries, across).item() == pytest.approx(0, abs=1e-9)
    assert diagnostics.key_concentration(queries, torch.zeros(1, 6, 4)).item() == 1


def test_value_concentration_weighs_tokens_by_squared_attention():
    """Attention 3/4 and 1/4 squared is 9 to 1: an error on the first token alone counts 1.8."""
    weights = torch.tensor([[[0.75, 0.25]]])
    error = torch.tensor([[[1.0], [0.0]]])
    assert diagnostics.value_concentration(weights, error).item() == pytest.approx(1.8)
    assert diagnostics.value_concentration(weights, torch.ones(1, 2, 1)).item() == pytest.approx(1)
