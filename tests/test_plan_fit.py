"""What is planned of a fit: its stages, and the sizes behind them."""

import dataclasses
import json

import pytest
import torch
from conftest import token_ids
from entries import geometry
from transformers import LlamaConfig

from kvmap import collect_pair, fit, plan, plan_fit
from kvmap.calibration import Calibration
from kvmap.cli.plan import here_text
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


@pytest.mark.parametrize("recipe", ["paper", "cachebridge", "kvmap", "kvmap-max"])
def test_a_plan_says_of_a_fit_what_its_own_plan_says(recipe, kvmap_run, planted_paths):
    """Whatever stage takes most; and so does the last line."""
    names = planted_paths("twin_llama")
    rows = json.loads(kvmap_run("plan", *names, "--json")[1])["maps"]
    found = json.loads(kvmap_run("fit", *names, "--recipe", recipe, "-n", "--json")[1])
    most = max(row["peak_bytes"] for row in found["fit"]["stages"])
    k = found["fit"]["k"]
    assert [r["fit_bytes"] for r in rows if (r["recipe"], r["k"]) == (recipe, k)] == [most]
    assert found["here"]["peak_bytes"] == max(most, found["collect"]["peak_bytes"])


@pytest.mark.parametrize("command", [("plan",), ("fit", "--recipe", "kvmap-max", "-n")])
def test_a_plan_measures_this_machine_once(command, kvmap_run, planted_paths, monkeypatch):
    """Times at rates of their own would contradict each other."""
    rates = iter([1e9])
    monkeypatch.setattr(plan, "matmul_rate", lambda: next(rates))
    name, *asked = command
    found = json.loads(kvmap_run(name, *planted_paths("twin_llama"), *asked, "--json")[1])
    for row in (found["collect"], *found.get("fit", {"stages": []})["stages"]):
        assert row["seconds"] == row["flops"] / 1e9
    if "fit" in found:
        steps = (found["collect"], *found["fit"]["stages"])
        assert found["here"]["seconds"] == sum(row["seconds"] for row in steps)


COLLECTING = {"disk_bytes": 3 * 10**9, "peak_bytes": 8 * 10**9, "seconds": 3600.0}
APART = COLLECTING | {"apart_peak_bytes": 40 * 10**9}
FITTING = [{"peak_bytes": 5 * 10**9, "seconds": 7200.0}]


@pytest.mark.parametrize(
    ("steps", "memory", "disk", "fits", "said"),
    [
        (
            [COLLECTING],
            9,
            4,
            True,
            "here: fits (peak 8.0 GB of 9.0 GB, disk 3.0 GB of 4.0 GB free), about 3.0 h at its "
            "present speed",
        ),
        (
            [COLLECTING],
            6,
            4,
            False,
            "here: does not fit: collecting needs 8.0 GB of memory, 6.0 GB are free",
        ),
        (
            [COLLECTING, COLLECTING],
            4,
            4,
            False,
            "here: does not fit: collecting needs 8.0 GB of memory, 4.0 GB are free; "
            "fitting needs 5.0 GB of memory, 4.0 GB are free; "
            "collecting needs 6.0 GB of disk, 4.0 GB are free",
        ),
        (
            [APART],
            9,
            4,
            None,
            "here: may not fit: collecting needs up to 40.0 GB of memory, 9.0 GB are free; "
            "about 3.0 h at its present speed",
        ),
    ],
    ids=["fits", "memory", "everything", "apart"],
)
def test_the_last_line_says_whether_this_machine_can(steps, memory, disk, fits, said, monkeypatch):
    monkeypatch.setattr(plan, "free_memory", lambda device: memory * 10**9)
    monkeypatch.setattr(plan, "free_disk", lambda folder: disk * 10**9)
    found = plan_fit.here(steps, FITTING, FITTING[0]["peak_bytes"])
    assert found["fits"] is fits
    assert here_text(found) == said


def test_a_plan_and_a_dry_run_end_in_what_this_machine_can(kvmap_run, planted_paths, monkeypatch):
    names = planted_paths("twin_llama")
    for command in (("plan", *names), ("fit", *names, "-n")):
        assert kvmap_run(*command)[1].splitlines()[-1].startswith("here: fits (peak ")
    with monkeypatch.context() as patch:
        patch.setattr(plan, "free_memory", lambda device: 10**6)
        assert kvmap_run("plan", *names)[1].splitlines()[-1].startswith("here: does not fit: ")
    monkeypatch.setattr(plan, "free_disk", lambda folder: 10**6)
    last = kvmap_run("plan", *names)[1].splitlines()[-1]
    assert last.endswith(" of disk, 1.0 MB are free")


def test_disk_is_asked_of_the_folder_that_will_be_made(tmp_path):
    assert plan.free_disk(tmp_path / "not" / "there") == pytest.approx(
        plan.free_disk(tmp_path), rel=0.1
    )


@pytest.mark.parametrize(
    ("sizes", "pairable"),
    [((151936, 128256), False), ((151936, 152064), None), ((50304, 50688), None)],
    ids=["families", "qwen2.5", "pythia"],
)
def test_vocabularies_that_padding_does_not_explain_are_refused(
    sizes, pairable, kvmap_run, tmp_path
):
    """Where tokenizers are at hand these decide."""
    small = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8}
    folders = [tmp_path / name for name in "ab"]
    for folder, size in zip(folders, sizes, strict=True):
        LlamaConfig(vocab_size=size, num_attention_heads=2, **small).save_pretrained(folder)
    code, text, error = kvmap_run("plan", *folders)
    if pairable is False:
        assert (code, "cannot be paired" in text.splitlines()[0]) == (2, True)
        assert "cannot be paired: vocabularies of 151,936 and 128,256 tokens" in error
        assert "here: " not in text
    else:
        assert (code, "may be paired" in text) == (0, True)


def test_a_frontier_is_planned_before_it_is_measured(collected, kvmap_run):
    folder, _ = collected
    code, text, error = kvmap_run("fit", folder, "--frontier", "-n")
    assert (code, error) == (0, "")
    assert "candidates of" in text.splitlines()[0]
    found = json.loads(kvmap_run("fit", folder, "--budget", "0.1", "-n", "--json")[1])["frontier"]
    assert found["candidates"] > found["fits"] > 0
    assert found["seconds"] > 0
    more = json.loads(
        kvmap_run("fit", folder, "--frontier", "-n", "--json", "--recipe", "paper")[1]
    )
    assert more["frontier"]["flops"] < found["flops"]  # with one ridge in place of eight
    assert kvmap_run("fit", folder, "--budget", "x", "-n")[0] == 2


def test_a_frontier_without_models_is_planned_as_far_as_it_goes(collected, kvmap_run, monkeypatch):
    def missing(*_):
        raise UsageError("no config")

    monkeypatch.setattr(plan_fit, "load_config", missing)
    text = kvmap_run("fit", collected[0], "--frontier", "-n")[1]
    assert text.splitlines()[1:] == ["  memory  -", "  work    -"]


def test_token_ids_count_before_any_model_is_there(kvmap_run, monkeypatch):
    monkeypatch.setattr(plan, "free_memory", lambda device: 10**10)
    asked = ("--sequences", 10**6, "--stride", 1023, "--no-dump", "-n", "--json")
    found = json.loads(kvmap_run("collect", "tiny-m", "tiny-l", *asked)[1])
    assert found["peak_bytes"] == 10**6 * 1024 * collect_pair.TOKEN_BYTES
    assert found["here"]["fits"] is False


def test_a_cache_folder_that_cannot_be_is_no_room(kvmap_run, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVMAP_CACHE", str(tmp_path / "file" / "x"))
    code, out, error = kvmap_run("plan", "tiny-m", "tiny-l")
    assert (code, out) == (1, "")
    assert "the folder could not be made (Not a directory)" in error


def test_room_is_that_of_the_folder_to_fill(kvmap_run, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(plan, "free_disk", lambda folder: asked.append(folder) or 10**12)
    out = tmp_path / "elsewhere"
    assert kvmap_run("collect", "tiny-s", "tiny-m", "-n", "-o", out)[0] == 0
    assert asked == [out]


def test_a_dry_run_refuses_what_a_calibration_does_not_keep(kvmap_run, tmp_path):
    calib = tmp_path / "c.calib"
    kept = ("--heads", "matched", "--no-joint", "--no-dump")
    small = ("--sequences", 10, "--length", 32, "--stride", 1)
    assert kvmap_run("collect", "tiny-s", "tiny-m", *small, *kept, "-o", calib)[0] == 0
    for how in ((), ("--frontier",)):
        code, out, error = kvmap_run("fit", calib, *how, "-n")
        assert (code, out) == (2, "")
        assert "does not record these inputs together" in error
    assert kvmap_run("fit", calib, "--recipe", "cachebridge", "-n")[0] == 0
