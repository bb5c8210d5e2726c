"""Keys to and from their positions, held against the models' own keys and the published formulas.

A round trip proves nothing here: undoing a wrong rotation and applying it again is exact.
"""

import checkpoints
import numpy as np
import oracles
import pytest
import torch
from conftest import token_ids

from kvmap.geometry import RopeTable
from kvmap.models import prefill
from kvmap.rope import Angles, rotate, rotate_with_gradient, strip

NAMES = list(checkpoints.SUPPORTED)
PUBLISHED = [name for name in NAMES if not name.startswith(("phi3", "glm4", "cohere", "smollm3"))]
# Three rows at different places: from 0, from an offset, and far out with gaps.
POSITIONS = torch.stack((torch.arange(12), torch.arange(12) + 777, 4000 + 3 * torch.arange(12)))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("name", NAMES)
def test_strip_gives_the_key_the_model_had_before_its_rotation(loaded, native, name):
    """fp32 angles near 4,000 radians are good to 2.4e-4, and both sides round alike."""
    ids = token_ids(3, 12)
    with oracles.recording_content_keys(native(name)) as content:
        keys, _ = oracles.native_cache(native(name), ids, POSITIONS)
    for layer, table in enumerate(loaded(name).signature.geometry.rope):
        assert relative(strip(keys[layer], POSITIONS, table), content[layer]) < 1e-5, layer
        assert relative(rotate(content[layer], POSITIONS, table), keys[layer]) < 1e-5, layer


@pytest.mark.parametrize("name", ["llama_yarn_other", "qwen3_large", "glm4_interleaved"])
def test_keys_do_turn(loaded, native, name):
    """The test above is not passed by leaving keys alone."""
    with oracles.recording_content_keys(native(name)) as content:
        keys, _ = oracles.native_cache(native(name), token_ids(3, 12), POSITIONS)
    assert all(relative(keys[layer], content[layer]) > 0.3 for layer in range(len(keys)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_tables_are_the_published_formulas(loaded, name):
    options = checkpoints.SUPPORTED[name][1]
    frequencies, scaling = oracles.rope_table(options["rope_parameters"], options["head_dim"])
    tables = loaded(name).signature.geometry.rope
    assert len(tables) == options["num_hidden_layers"]
    for table in tables:
        np.testing.assert_allclose(table.inverse_frequencies, frequencies, rtol=1e-5)
        assert table.scaling == pytest.approx(scaling, rel=1e-6)
        assert table.layout == "half"


def test_layers_without_rope_have_no_table(loaded):
    rope = loaded("smollm3_nope").signature.geometry.rope
    assert [table is None for table in rope] == [False, True, False, True]


def test_interleaved_layout_is_recognised(loaded):
    for name, planes in (("glm4_interleaved", 4), ("cohere_interleaved", 8)):
        for table in loaded(name).signature.geometry.rope:
            assert (table.layout, len(table.inverse_frequencies)) == ("interleaved", planes)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("planes", "scaling"), [(4, 1.0), (8, 1.3), (6, 0.7)])
def test_rotate_is_a_complex_product_per_plane(layout, planes, scaling):
    """Channels past the planes pass through, without the scaling."""
    content = torch.randn(2, 3, 5, 16, generator=torch.Generator().manual_seed(planes))
    positions = torch.tensor([[0, 1, 2, 3, 4], [9, 30, 31, 500, 2]])
    frequencies = 1e4 ** (-np.arange(planes) / planes)
    expected = oracles.rotate(content.numpy(), positions.numpy(), frequencies, scaling, layout)
    table = RopeTable(tuple(frequencies.tolist()), scaling, layout)
    found = rotate(content, positions, table)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-4)
    assert torch.equal(found[..., 2 * planes :], content[..., 2 * planes :])
    back = strip(torch.from_numpy(expected).float(), positions, table)
    np.testing.assert_allclose(back.numpy(), content.numpy(), atol=1e-4)


def test_padded_batch_strips_to_the_same_keys_as_a_row_alone(loaded):
    """Positions come from the mask; the pads' own keys are nobody's concern."""
    model, ids, pads = loaded("llama_llama3"), token_ids(1, 20), 7
    batch = torch.cat((torch.cat((torch.zeros(1, pads, dtype=torch.long), ids[:, :-pads]), 1), ids))
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, :pads] = False
    padded, _ = prefill(model, batch, mask=mask)
    alone, _ = prefill(model, ids[:, :-pads])
    assert padded.positions[0, pads:].tolist() == list(range(20 - pads))
    for layer, table in enumerate(model.signature.geometry.rope):
        found = strip(padded.keys[layer], padded.positions, table)[:1, :, pads:]
        expected = strip(alone.keys[layer], alone.positions, table)
        assert relative(found, expected) < 1e-5


@pytest.mark.parametrize("name", ["qwen3_small", "llama_yarn", "ministral3"])
def test_bf16_keys_strip_to_within_their_own_rounding(loaded, name):
    """The cached key is rounded to 8 bits: 2.7e-3 relative is the floor."""
    model = loaded(name, "bfloat16")
    with oracles.recording_content_keys(model.model) as content:
        keys, _ = oracles.native_cache(model.model, token_ids(3, 12), POSITIONS)
    for layer, table in enumerate(model.signature.geometry.rope):
        stripped = strip(keys[layer], POSITIONS, table)
        assert stripped.dtype == torch.float32
        assert relative(stripped, content[layer].float()) < 5e-3


def test_bf16_keys_keep_their_phase_at_long_contexts():
    """A table in bf16 would be off by whole turns at position 30,000."""
    frequencies = 1e6 ** (-np.arange(32) / 32)
    content = torch.randn(1, 2, 8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    positions = 30_000 + 17 * torch.arange(8)[None]
    exact = oracles.rotate(content.double().numpy(), positions.numpy(), frequencies, 1.0)
    table = RopeTable(tuple(frequencies.tolist()))
    assert relative(rotate(content, positions, table), torch.from_numpy(exact)) < 2e-3
    keys = torch.from_numpy(exact).bfloat16()
    assert relative(strip(keys, positions, table), content.double()) < 5e-3


def test_without_a_table_keys_are_content():
    keys = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    for turn in (strip, rotate):
        found = turn(keys, torch.arange(3)[None], None)
        assert found.dtype == torch.float32
        assert torch.equal(found, keys.float())


def test_inputs_are_left_alone():
    keys, positions = torch.ones(1, 1, 3, 4), torch.arange(3)[None]
    table = RopeTable((1.0, 0.1))
    strip(keys, positions, table), rotate(keys, positions, table)
    assert torch.equal(keys, torch.ones(1, 1, 3, 4))
    assert torch.equal(positions, torch.arange(3)[None])


TABLES = [
    None,
    RopeTable((1.0, 0.3, 0.01), 1.2),
    RopeTable((1.0, 0.3, 0.01), 0.7, "interleaved"),
    RopeTable((1.0, 0.3, 0.1, 0.01)),
]


@pytest.mark.parametrize("table", TABLES)
def test_rotation_with_gradient_is_the_same_rotation(table):
    """And a rotation's gradient is the rotation back, without the division by the scaling."""
    content = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.stack((torch.arange(5), torch.arange(5) * 90))
    content.requires_grad_()
    turned = rotate_with_gradient(content, positions, table)
    torch.testing.assert_close(turned, rotate(content.detach(), positions, table))
    weights = torch.randn(turned.shape, generator=torch.Generator().manual_seed(1))
    (turned * weights).sum().backward()
    back = strip(weights, positions, table)
    planes = 2 * len(table.inverse_frequencies) if table else 0
    squared = table.scaling**2 if table else 1.0
    torch.testing.assert_close(content.grad[..., :planes], back[..., :planes] * squared)
    torch.testing.assert_close(content.grad[..., planes:], weights[..., planes:])


def test_angles_serve_several_tables():
    """Layers with tables of their own share the positions, not the cos and sin."""
    keys = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(5)[None] + 100
    angles = Angles(positions[:, None])
    for table in (*TABLES, *TABLES):
        found = angles.turn(keys, table, torch.empty_like(keys))
        assert torch.equal(found, rotate(keys, positions, table))
        back = angles.undo(found, table, torch.empty_like(keys))
        torch.testing.assert_close(back, keys)
