"""Networks: they learn what a linear map cannot, and are left out where they do not help."""

import dataclasses

import pytest
import torch
from conftest import token_ids

from kvmap import artifacts, fit, pipeline
from kvmap.calibration import Calibration
from kvmap.calibration_files import write_index
from kvmap.collect import collect
from kvmap.collect_options import CollectOptions
from kvmap.errors import UsageError
from kvmap.fit import network
from kvmap.handoff import map_middle
from kvmap.mapping import Affine, CacheMap
from kvmap.models import prefill


def bent(count, seed):
    """Draw y = |x|A for two groups: of no use to a linear map."""
    relation = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(7))
    x = torch.randn(2, count, 6, generator=torch.Generator().manual_seed(seed)) * 3 + 1
    return network.Sample(x, (x - 1).abs() @ relation)


@pytest.mark.parametrize("sizes", [(6, 64, -1), (6, 64, 64, -1)])
def test_a_network_learns_what_is_not_linear(sizes):
    train, unseen = bent(6000, 1), bent(1000, 2)
    part = Affine(torch.zeros(2, 6, 4), train.outputs.mean(1))
    made = network.trained(part, (train, unseen), sizes, seed=0)
    before, after = (
        (p(unseen.inputs) - unseen.outputs).square().mean().item() for p in (part, made)
    )
    assert after < 0.3 * before
    assert torch.equal(made.weight, part.weight)
    assert len(made.network) == len(sizes) - 1


def test_a_network_that_helps_nothing_is_left_out():
    noise = [
        network.Sample(*torch.randn(2, 1, 40, 5, generator=torch.Generator().manual_seed(seed)))
        for seed in (1, 2)
    ]
    part = Affine(torch.zeros(1, 5, 5), torch.zeros(1, 5))
    assert network.trained(part, tuple(noise), (5, 64, -1), seed=0).plain


def fitted(pair, folder, method, dump=True, heads="all", damage=lambda calibration: None):
    models = pair("noisy_image")
    openers = tuple(lambda model=model: model for model in models)
    options = CollectOptions(stride=1, heads="all", joint=True, dump=dump, shard=16)
    calibration = collect(openers, token_ids(32, 48, 3), folder, options, {})
    damage(calibration)
    calibration = Calibration.open(folder)
    recipe = fit.recipe("kvmap")
    recipe = dataclasses.replace(
        recipe,
        k=1,
        method=method,
        width=16,
        options=dataclasses.replace(recipe.options, heads=heads),
    )
    layers = tuple((at % 3,) for at in range(4))
    return models, pipeline.fit_map(calibration, layers, recipe, lambda *_: None, openers)


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_a_residual_is_no_worse_on_held_out_rows(pair, tmp_path, heads):
    _, plain = fitted(pair, tmp_path / "a", "closed-form", heads=heads)
    _, made = fitted(pair, tmp_path / "b", "residual", heads=heads)
    for kind in ("key", "value"):
        gain = made.scores.held_out[kind] - plain.scores.held_out[kind]
        assert gain[1:].sum() > -1e-6


def test_a_map_with_networks_is_saved_loaded_and_applied(pair, tmp_path):
    models, made = fitted(pair, tmp_path / "calibration", "mlp")
    assert any(not layer.key.plain for layer in made.cmap.layers if layer)
    again = CacheMap.load(made.cmap.save(tmp_path / "map"))
    cache = prefill(models[0], token_ids(2, 20, 4))[0]
    for found, expected in zip(
        map_middle(again, models[1], cache).keys,
        map_middle(made.cmap, models[1], cache).keys,
        strict=True,
    ):
        assert torch.equal(found, expected)


def test_networks_need_the_rows(pair, tmp_path):
    with pytest.raises(UsageError, match=r"networks need the rows.*--no-dump"):
        fitted(pair, tmp_path / "calibration", "residual", dump=False)


@pytest.mark.parametrize(
    ("side", "name", "change", "said"),
    [
        ("source", "key.1", lambda t: t.int(), "'key.1' is of int32, expected float64 or"),
        ("target", "value.2", lambda t: t[:, :1], r"'value.2' has shape \(.*, expected \("),
        ("source", "position", lambda t: t.float(), "'position' is of float32, expected int64"),
        ("source", "sequence", lambda t: t.flip(0), "hold different tokens"),
        ("source", "position", lambda t: t.unsqueeze(0), "has shape"),
        ("target", "key.0", None, "is damaged: its tensors do not match their digest"),
    ],
)
def test_rows_are_checked_before_a_network_learns_of_them(pair, tmp_path, side, name, change, said):
    """Of a file whose digests are right too, unless a bit was turned (None)."""

    def damage(calibration):
        path = calibration.path / f"{side}-00001.safetensors"
        if change is None:
            data = bytearray(path.read_bytes())
            data[-3] ^= 1
            path.write_bytes(data)
            return
        opened = artifacts.open_artifact(path)
        tensors = opened.tensors()
        artifacts.write(path, "dump", tensors | {name: change(tensors[name])}, opened.metadata)
        write_index(calibration.path, calibration.index)

    with pytest.raises(UsageError, match=said):
        fitted(pair, tmp_path / "calibration", "residual", damage=damage)
