"""What is planned of a fit: its stages, and the sizes behind them."""

import dataclasses
import json

import pytest
import torch
from conftest import token_ids
from entries import geometry

from kvmap import collect_pair, fit, plan_fit
from kvmap.calibration import Calibration
from kvmap.collect_options import CollectOptions
from kvmap.errors import UsageError
from kvmap.fit_pair import FitRequest
from kvmap.fit_stages import FitSize, ModelSize, stages
from kvmap.map_options import MapOptions
from kvmap.models import prefill
from kvmap.models.configs import tape_width

SHAPES = (geometry(6, 2, 8), geometry(5, 4, 6, theta=5e5))
SIZES = (ModelSize(10**5, 200, 4), ModelSize(2 * 10**5, 300, 4))


def planned(recipe, /, **changes):
    """Return the stages of a fit of a made-up pair, by name."""
    given = {
        "recipe": recipe,
        "k": 2,
        "shapes": SHAPES,
        "models": SIZES,
        "grid": (40, 64),
        "options": CollectOptions(stride=2),
        "moments": 1000,
        "itemsize": 4,
    }
    return {row["stage"]: row for row in stages(FitSize(**(given | changes)), rate=1e9)}


def recipe(**changes):
    return fit.Recipe(2, 1e-2, MapOptions(joint=True, native_head=4, exact_first=True), **changes)


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({}, ["closed form"]),
        ({"weights": "attention"}, ["row weights", "closed form"]),
        ({"method": "mlp"}, ["closed form", "networks"]),
        ({"polish": 5, "method": "residual"}, ["closed form", "networks", "polish"]),
    ],
    ids=str,
)
def test_a_stage_is_planned_where_the_recipe_asks_for_it(asked, names):
    found = planned(recipe(**asked))
    assert list(found) == names
    for row in found.values():
        assert row["peak_bytes"] > 1000
        assert row["seconds"] == row["flops"] / 1e9 > 0


EVERYTHING = recipe(weights="attention", method="mlp", polish=40)
LARGER = {
    "k": {"k": 3},
    "text": {"grid": (80, 64)},
    "length": {"grid": (40, 128)},
    "target": {"models": (SIZES[0], ModelSize(4 * 10**5, 600, 4))},
    "vocabulary": {"shapes": (SHAPES[0], dataclasses.replace(SHAPES[1], vocabulary=500))},
    "moments": {"moments": 10**9},
    "steps": {"recipe": dataclasses.replace(EVERYTHING, polish=80)},
    "width": {"recipe": dataclasses.replace(EVERYTHING, width=4096)},
}
# What does not grow with it.
SAME = {
    ("text", "closed form"),
    ("length", "closed form"),
    *((name, "closed form") for name in ("target", "vocabulary", "steps", "width")),
    *((name, "networks") for name in ("target", "vocabulary", "steps")),
    *((name, "row weights") for name in ("steps", "width")),
    ("width", "polish"),
}


@pytest.mark.parametrize("name", LARGER)
def test_a_stage_takes_more_of_what_it_works_on(name):
    """Memory or work; neither where it has nothing to do with the stage."""
    before = planned(EVERYTHING)
    changes = dict(LARGER[name])
    after = planned(changes.pop("recipe", EVERYTHING), **changes)
    for stage, row in before.items():
        if (name, stage) == ("vocabulary", "row weights"):
            continue  # the same weights with fewer of them in the layers
        grown = [after[stage][key] / row[key] for key in ("peak_bytes", "flops")]
        assert (max(grown) > 1) == ((name, stage) not in SAME), (stage, grown)
        assert min(grown) >= 1


def test_what_runs_a_model_is_not_planned_without_its_config():
    found = planned(EVERYTHING, models=(None, None))
    unknown = {name for name, row in found.items() if row["peak_bytes"] is None}
    assert unknown == {"row weights", "polish"}
    assert all(found[name]["seconds"] is None for name in unknown)


@pytest.mark.parametrize("name", ["llama_llama3", "qwen3_large", "qwen2_bias"])
def test_what_a_layer_keeps_for_a_gradient_is_counted(loaded, name):
    """Beside what is there once for all layers: angles and a mask; and one number per head."""
    model = loaded(name)
    shape = model.signature.geometry
    given, asked = token_ids(2, 40), token_ids(2, 16, seed=1)
    cache, _ = prefill(model, given)
    past = dataclasses.replace(cache, keys=tuple(k.clone().requires_grad_() for k in cache.keys))
    frozen = {p.untyped_storage().data_ptr() for p in model.model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in frozen:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _, logits = prefill(model, asked, past=past, gradient=True)
    assert logits.requires_grad
    tape = asked.numel() * tape_width(model.model.config)
    # Keys and values, once for every query head.
    read = 2 * (given.numel() + asked.numel()) * shape.query_heads * shape.head_size
    assert sum(kept.values()) == pytest.approx(4 * shape.layers * (tape + read), rel=0.1)


@pytest.fixture
def collected(kvmap_run, planted_paths, tmp_path):
    """Return the folder of a small calibration, and those of its models."""
    lines = [json.dumps({"text": "a b c d " * 40}) for _ in range(12)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    names, made = planted_paths("twin_llama"), tmp_path / "calib"
    shape = ("--sequences", 12, "--length", 32, "--stride", 1)
    asked = ("collect", *names, "--dataset", tmp_path / "text.jsonl", *shape, "-o", made)
    assert kvmap_run(*asked)[0] == 0
    return made, names


def test_a_calibration_says_what_fitting_it_takes(collected, kvmap_run):
    folder, names = collected
    asked = ("fit", folder, "--recipe", "kvmap-max", "-k", 2, "--weights", "attention", "-n")
    code, text, _ = kvmap_run(*asked)
    assert code == 0
    for row in ("fit, k = 2  ", "row weights", "closed form", "polish"):
        assert row in text
    found = json.loads(kvmap_run(*asked, "--json")[1])["fit"]["stages"]
    assert [row["stage"] for row in found] == ["row weights", "closed form", "polish"]
    both = json.loads(kvmap_run("fit", *names, *asked[2:], "--json", "--length", 32)[1])
    assert found[2]["peak_bytes"] < both["fit"]["stages"][2]["peak_bytes"]  # of 500 sequences


def test_an_automatic_k_is_planned_at_its_largest(collected, kvmap_run):
    _, text, _ = kvmap_run("fit", collected[0], "--recipe", "paper", "-k", "auto", "-n")
    assert "k = 2 at most" in text  # 11 sequences of 32 tokens have rows for no more


def test_chosen_layers_tell_k(collected, kvmap_run, tmp_path):
    folder, choice = collected[0], tmp_path / "layers"
    assert kvmap_run("select-layers", folder, "-k", 3, "-o", choice)[0] == 0
    asked = ("fit", folder, "--recipe", "paper", "--layers", choice, "-n", "--json")
    assert json.loads(kvmap_run(*asked)[1])["fit"]["k"] == 3


def test_a_calibration_without_its_models_plans_what_it_can(collected, kvmap_run, monkeypatch):
    def missing(*_):
        raise UsageError("no config")

    monkeypatch.setattr(plan_fit, "load_config", missing)
    request = FitRequest(fit.recipe("kvmap-max"))
    calibration = Calibration.open(collected[0])
    found = plan_fit.calibration_plan(calibration, request, collect_pair.Loading())["fit"]["stages"]
    assert [row["peak_bytes"] is None for row in found] == [False, True]
    text = kvmap_run("fit", collected[0], "--recipe", "kvmap-max", "-n")[1]
    assert text.splitlines()[-1].split() == ["polish", "-", "-", "-"]
