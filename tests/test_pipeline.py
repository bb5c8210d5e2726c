"""Stages run when they must, and only then; what they choose is right where the answer is known."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import token_ids
from entries import SOURCE, TARGET, moments, noise, related
from safetensors.torch import load_file, save_file

from kvmap import artifacts, collect_pair, fit, fit_pair, models, pipeline, plan
from kvmap.calibration_files import Scope
from kvmap.collect import collect
from kvmap.collect_options import CollectOptions
from kvmap.columns import first_and_middle
from kvmap.errors import KvmapError, UsageError
from kvmap.fit import Recipe, Splits
from kvmap.fit.choice import Choice, auto_counts, select_layers
from kvmap.fit.job import splits
from kvmap.layers import LayerScores, load_layers, save_layers
from kvmap.map_options import weight_shape
from kvmap.mapping import CacheMap, MapOptions
from kvmap.models.load import identify

RECIPE = Recipe(1, 1e-6, MapOptions())
LOADING = collect_pair.Loading("cpu", "float32")
STAGES = ("collect", "select-layers", "fit")


def write_text(path, seed: int = 0) -> str:
    """Write documents of several hundred letters."""
    letters = token_ids(24, 400, seed)
    documents = ["".join(chr(97 + int(i) % 26) for i in row) for row in letters]
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return str(path)


@pytest.fixture(scope="module")
def first(planted_paths, tmp_path_factory):
    """Return a function that fits a pair by the names of its folders, and its first result."""
    folder = tmp_path_factory.mktemp("first")
    text = write_text(folder / "text.jsonl")

    def go(names=None, recipe=RECIPE, dataset=text, loading=LOADING, **options):
        names = names or tuple(map(str, planted_paths("twin_llama")))
        texts = collect_pair.TextOptions(dataset, "train", 12, 32, 0)
        chosen = CollectOptions(**({"stride": 2, "dump": False} | options))
        return fit_pair.fit_pair(names, texts, chosen, fit_pair.FitRequest(recipe), loading)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVMAP_CACHE", str(folder / "cache"))
        return go, go(), folder / "cache"


@pytest.fixture
def fitted(first, tmp_path, monkeypatch):
    """Return the fitting function, with a cache folder that has the first result."""
    shutil.copytree(first[2], tmp_path / "cache")
    monkeypatch.setenv("KVMAP_CACHE", str(tmp_path / "cache"))
    return first[0]


def test_second_fit_runs_nothing_and_opens_no_model(first, fitted, monkeypatch):
    report = first[1]
    assert report.reused == ()

    def never(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(models, "load", never)
    second = fitted()
    assert second.reused == STAGES
    assert (second.path.name, second.k) == (report.path.name, report.k)
    assert second.to_json()["reused"] == list(STAGES)
    assert second.to_json()["r2"] == report.to_json()["r2"]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"recipe": dataclasses.replace(RECIPE, ridge=1e-2)}, ("collect",)),
        ({"recipe": dataclasses.replace(RECIPE, k=2)}, ("collect",)),
        ({"recipe": fit.recipe("kvmap")}, None),
        ({"stride": 1}, ()),
        ({"held_out": 0.5}, ()),
        ({"loading": collect_pair.Loading("cpu", "bfloat16")}, ()),
    ],
    ids=["ridge", "k", "recipe", "stride", "held-out", "dtype"],
)
def test_a_change_runs_what_depends_on_it_again(fitted, change, kept):
    """The default recipe may need moments that the first did not collect."""
    changed = fitted(**change)
    assert changed.reused == kept or (kept is None and "fit" not in changed.reused)
    again = fitted()
    assert again.reused == STAGES
    assert again.path != changed.path


@pytest.fixture
def little_room(planted_paths, monkeypatch):
    """Leave memory for the moments of two chosen layers, and none for those of all."""
    shapes = collect_pair.geometries(tuple(map(str, planted_paths("twin_llama"))), LOADING)
    sample = plan.moments_bytes(*shapes, Scope("matched", False))
    layers = ((0,), (1,), (0,), (1,))[: shapes[1].layers]
    some = plan.moments_bytes(*shapes, Scope("all", False, layers))
    room = max(sample, some)
    assert room < plan.moments_bytes(*shapes, Scope("all", False))
    monkeypatch.setattr(plan, "free_memory", lambda device: room)
    return shapes


TEXT = collect_pair.TextOptions(None, "train", 12, 32, 0)


def two_passes(names, text, recipe, said, **options):
    """Fit a pair with what is kept of it as small as it goes."""
    kept = CollectOptions(**({"stride": 2, "joint": False} | options))
    asked = fit_pair.FitRequest(recipe)
    texts = dataclasses.replace(TEXT, dataset=text)
    return fit_pair.fit_pair(names, texts, kept, asked, LOADING, note=said.append)


def test_two_passes_are_made_where_moments_do_not_fit(
    little_room, planted_paths, monkeypatch, tmp_path
):
    """The same map as by hand: a sample, a choice, a collection of what it reads, a fit."""
    monkeypatch.setattr(plan, "SAMPLE", 8)
    monkeypatch.setenv("KVMAP_CACHE", str(tmp_path / "cache"))
    names = tuple(map(str, planted_paths("twin_llama")))
    text, recipe = write_text(tmp_path / "text.jsonl"), dataclasses.replace(RECIPE, k=1)
    said: list[str] = []
    report = two_passes(names, text, recipe, said)
    assert report.reused == ()
    assert "in two passes, since the moments of all heads would take" in said[0]
    assert "a sample of 8 sequences chooses 1 source layers per target layer" in said[0]

    texts = dataclasses.replace(TEXT, dataset=text)
    few = collect_pair.read_text(
        names, dataclasses.replace(texts, sequences=8), LOADING, said.append
    )
    kept = CollectOptions(stride=2, heads="matched", joint=False)
    sample, _ = collect_pair.collect_pair(
        names, few, kept, tmp_path / "a", LOADING, lambda *_: None
    )
    chosen = dataclasses.replace(fit.recipe("paper"), k=1)
    layers, path, _ = pipeline.cached_layers(sample, chosen, "top", tmp_path / "layers")
    whole = collect_pair.read_text(names, texts, LOADING, said.append)
    kept = dataclasses.replace(kept, heads="all", layers=layers.layers)
    second, _ = collect_pair.collect_pair(
        names, whole, kept, tmp_path / "b", LOADING, lambda *_: None
    )
    request = fit_pair.FitRequest(recipe, layers=path, out=tmp_path / "map")
    by_hand = fit_pair.fit_calibration(second, request, lambda *_: None).cmap
    for mine, theirs in zip(report.cmap.layers, by_hand.layers, strict=True):
        assert mine.source_layers == theirs.source_layers
        for kind in ("key", "value"):
            assert torch.equal(mine.of(kind).weight, theirs.of(kind).weight)

    assert two_passes(names, text, recipe, said).reused == (
        "sample",
        *STAGES[1:2],
        "collect",
        "fit",
    )
    shutil.rmtree(report.path.parent)
    with monkeypatch.context() as patch:  # a first pass that was made is not made again
        patch.setattr(models, "load", None)
        assert two_passes(names, text, recipe, said).reused[0] == "sample"


def test_a_free_k_is_what_fits(little_room, planted_paths, monkeypatch, tmp_path):
    monkeypatch.setenv("KVMAP_CACHE", str(tmp_path / "cache"))
    names = tuple(map(str, planted_paths("twin_llama")))
    text, said = write_text(tmp_path / "text.jsonl"), []
    report = two_passes(names, text, dataclasses.replace(RECIPE, k="auto"), said)
    assert report.k == 1
    assert f"chooses at most {little_room[0].layers} source layers" in said[0]
    with pytest.raises(UsageError, match="are free here; give --heads matched or a smaller -k"):
        two_passes(names, text, dataclasses.replace(RECIPE, k=3), said)
    monkeypatch.setattr(plan, "free_memory", lambda device: 30_000)  # the token ids alone
    with pytest.raises(UsageError, match="so this takes a machine with more"):
        two_passes(names, text, RECIPE, said, stride=1)


def test_plan_says_both_passes_of_the_default_recipe(little_room, kvmap_run, planted_paths):
    code, text, _ = kvmap_run("plan", *planted_paths("twin_llama"))
    assert code == 0
    assert text.count("collect 64 sequences") == 1
    assert text.count("collect 500 sequences") == 1


def test_two_passes_are_planned_for_the_largest_k_that_fits(little_room, kvmap_run, planted_paths):
    asked = ("fit", *planted_paths("twin_llama"), "--recipe", "paper", "--no-joint", "-n", "--json")
    ks = [json.loads(kvmap_run(*asked, "-k", k)[1])["second_pass"]["k"] for k in (2, "auto")]
    assert ks == [2, 1]
    assert json.loads(kvmap_run(*asked, "-k", 2)[1])["second_pass"]["too_large"]


def test_the_memory_of_a_fit_is_the_same_in_every_table(little_room, kvmap_run, planted_paths):
    """Of two passes, where the moments are those of chosen layers."""
    asked = ("fit", *planted_paths("twin_llama"), "--recipe", "paper", "-k", 2, "-n", "--json")
    found = json.loads(kvmap_run(*asked)[1])
    assert "second_pass" in found
    (row,) = [row for row in found["maps"] if row["recipe"] == "paper"]
    weights = row["flops_per_token"] / 2 / found["target"]["parameters"]
    assert row["work_share"] == pytest.approx(weights)
    assert row["fit_bytes"] != found["fit"]["stages"][0]["peak_bytes"]  # of k = 3, not 2
    found = json.loads(kvmap_run(*asked[:5], "-n", "--json")[1])
    assert row["k"] == found["fit"]["k"]
    assert row["fit_bytes"] == found["fit"]["stages"][0]["peak_bytes"]


MORE = "this takes a machine with more"


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"heads": "all", "k": 2}, "give --heads matched or a smaller -k"),
        ({"heads": "all"}, "give --heads matched"),
        ({"joint": True}, "give --lookback-layers 0"),
        ({"joint": True, "lookback_layers": (0,)}, MORE),
        ({}, MORE),
    ],
    ids=str,
)
def test_only_what_makes_moments_fit_is_hinted_at(little_room, monkeypatch, given, hint):
    asked = {"heads": "matched", "joint": False} | given
    layers = (tuple(range(asked.pop("k", 1))),) * little_room[1].layers
    options = CollectOptions(layers=layers, **asked)
    whole = plan.moments_bytes(*little_room, options.scope)
    for free, expected in ((whole - 1, hint), (0, MORE)):
        monkeypatch.setattr(plan, "free_memory", lambda device, free=free: free)
        said = plan.too_large(*little_room, options)
        assert said.endswith(f"are free here; {expected}")


def test_a_hint_of_layers_to_choose_is_of_layers_that_are_there(little_room):
    said = plan.too_large(*little_room, CollectOptions(heads="all", joint=True))
    assert f"`kvmap select-layers CALIB -k {little_room[0].layers} " in said


def test_layers_that_are_given_take_no_sample(
    little_room, kvmap_run, planted_paths, monkeypatch, tmp_path
):
    """Neither in the plan nor in what is said of the run."""
    monkeypatch.setattr(plan, "SAMPLE", 8)
    monkeypatch.setenv("KVMAP_CACHE", str(tmp_path / "cache"))
    names = tuple(map(str, planted_paths("twin_llama")))
    text, said = write_text(tmp_path / "text.jsonl"), []
    recipe = dataclasses.replace(RECIPE, k=1)
    report = two_passes(names, text, recipe, said)
    asked = ("fit", *names, "--layers", report.layers_path, "--recipe", "paper", "--no-joint")
    found = json.loads(kvmap_run(*asked, "-n", "--json")[1])
    assert "first_pass" not in found
    assert found["fit"]["k"] == 1
    request = fit_pair.FitRequest(recipe, layers=report.layers_path)
    kept, texts = CollectOptions(stride=2, joint=False), dataclasses.replace(TEXT, dataset=text)
    fit_pair.fit_pair(names, texts, kept, request, LOADING, note=said.append)
    assert len(said) == 1


def test_layers_are_not_chosen_greedily_in_two_passes(
    little_room, kvmap_run, planted_paths, tmp_path
):
    names = tuple(map(str, planted_paths("twin_llama")))
    texts = dataclasses.replace(TEXT, dataset=write_text(tmp_path / "text.jsonl"))
    request = fit_pair.FitRequest(RECIPE, "greedy")
    with pytest.raises(UsageError, match="--method greedy tries layers together"):
        fit_pair.fit_pair(names, texts, CollectOptions(joint=False), request, LOADING)
    code, _, error = kvmap_run("fit", *names, "--method", "greedy", "--dry-run")
    assert code == 2
    assert "--method greedy tries layers together" in error


def test_a_dry_run_says_that_there_are_two_passes(little_room, kvmap_run, planted_paths):
    names = planted_paths("twin_llama")
    asked = ("fit", *names, "--recipe", "paper", "--sequences", "100", "--dry-run")
    code, text, _ = kvmap_run(*asked)
    assert code == 0
    assert "in two passes, since the moments of all heads would take" in text
    assert "collect 64 sequences of 1024 tokens, one token in 4 kept, moments of matched" in text
    assert "collect 100 sequences of 1024 tokens, one token in 4 kept, moments of all" in text
    found = json.loads(kvmap_run(*asked, "--json")[1])
    first, second = found["first_pass"], found["second_pass"]
    assert first["moments_bytes"] < found["collect"]["moments_bytes"]
    assert second["moments_bytes"] <= second["apart_moments_bytes"]
    assert second["apart_moments_bytes"] - second["moments_bytes"] == (
        second["apart_peak_bytes"] - second["peak_bytes"]
    )
    assert first["seconds"] < second["seconds"]
    assert found["fit"]["k"] == second["k"]
    code, _, error = kvmap_run("collect", *names, "--heads", "all", "--sequences", "9", "-n")
    assert (code, error) == (0, "")


def test_other_text_under_the_same_name_is_noticed(fitted, tmp_path):
    text = write_text(tmp_path / "text.jsonl", seed=1)
    assert fitted(dataset=text).reused == ()


def test_same_text_elsewhere_is_the_same_text(fitted, tmp_path):
    assert fitted(dataset=write_text(tmp_path / "text.jsonl")).reused == STAGES


def test_changed_weights_are_noticed(fitted, planted_paths, tmp_path):
    """The folder stays where it is; one weight does not."""
    source, target = planted_paths("twin_llama")
    copy = tmp_path / "target"
    shutil.copytree(target, copy)
    names = (str(source), str(copy))
    assert fitted(names).reused == STAGES, "equal files elsewhere are the same model"
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"][0, 0] += 1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert fitted(names).reused == ()


def test_a_finished_stage_survives_the_next_one_failing(fitted, monkeypatch, tmp_path):
    shutil.rmtree(tmp_path / "cache")

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fit_pair, "fit_map", fail)
        with pytest.raises(KeyboardInterrupt):
            fitted()
    assert fitted().reused == ("collect", "select-layers")


@pytest.mark.parametrize("damage", ["digests", "run", "other run"])
def test_what_cannot_be_gone_on_with_in_the_cache_folder_is_collected_anew(
    fitted, tmp_path, damage
):
    """There nobody could say --force."""
    (folder,) = [path for path in (tmp_path / "cache" / "calibrations").iterdir() if path.is_dir()]
    index = artifacts.read_json(folder / "index.json")
    if damage == "digests":
        artifacts.write_json(folder / "index.json", index | {"digests": None})
    else:
        (folder / "index.json").unlink()
        (folder / "run.json").write_text("{")
    if damage == "other run":
        artifacts.write_json(folder / "run.json", {"kind": "run", "text": "another"})
    assert fitted().reused == ("select-layers", "fit")
    assert artifacts.read_json(folder / "index.json") == index
    assert not (folder / "run.json").exists()
    assert fitted().reused == STAGES


@pytest.mark.parametrize("dump", [True, False])
def test_room_on_the_disk_is_asked_for_as_it_is_taken(planted_paths, tmp_path, monkeypatch, dump):
    """To a fifth, headers and places of rows; what is in the folder already counts as free."""
    names = tuple(map(str, planted_paths("twin_llama")))
    texts = dataclasses.replace(TEXT, dataset=write_text(tmp_path / "text.jsonl"))
    shapes = collect_pair.geometries(names, LOADING)
    kept = collect_pair.with_scope(CollectOptions(stride=2, dump=dump), shapes)
    where, found = tmp_path / "c", collect_pair.read_text(names, texts, LOADING, print)
    made, _ = collect_pair.collect_pair(names, found, kept, where, LOADING, lambda *_: None)
    taken = made.bytes

    def asked(free):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        collect_pair.require_room(names, texts, kept, where, LOADING)

    asked(0)
    shutil.rmtree(where)
    asked(taken)
    with pytest.raises(KvmapError, match=r"12 sequences of 32 tokens would take .* GB there"):
        asked(0.8 * taken)


def test_fitting_again_from_nothing_gives_the_same_bytes(first, fitted, tmp_path):
    shutil.rmtree(tmp_path / "cache")
    assert fitted().path.read_bytes() == first[1].path.read_bytes()


def test_report_tells_both_splits(first):
    """A planted pair is all but exact, seen or not; 11 of 12 sequences are fitted."""
    report = first[1].to_json()
    assert set(report["r2"]) == {"train", "held_out"}
    for split in report["r2"].values():
        assert all(0.99 < split[kind] <= 1 for kind in ("key", "value"))
    assert report["rows_per_input"] == 11 * 16 / 32
    assert report["k"] == 1
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize("name", ["qwen3_small", "llama_yarn", "ministral3", "phi3_partial"])
def test_models_are_identified_without_loading_them(checkpoint, loaded, name):
    assert identify(str(checkpoint(name))) == loaded(name).signature.digest


# --- choosing


def recovered(calibration, method: str, recipe: Recipe) -> Choice:
    return select_layers(splits(calibration, 4), recipe, method)


@pytest.mark.parametrize("method", ["top", "greedy"])
@pytest.mark.parametrize("name", ["twin_llama", "image"])
def test_one_layer_is_chosen_and_it_is_the_right_one(plant, calibration, name, method):
    recipe = dataclasses.replace(RECIPE, k=1, options=MapOptions(native_head=4))
    choice = recovered(calibration(name), method, recipe)
    assert choice.layers == tuple((of,) for of in plant(name).source_layers)
    assert choice.k == 1


def test_automatic_k_is_one_where_one_layer_says_it_all(calibration):
    recipe = Recipe("auto", "auto", MapOptions(native_head=4))
    choice = recovered(calibration("twin_llama"), "top", recipe)
    assert choice.k == 1
    assert choice.tried[1] > 0.9999


def test_automatic_k_takes_all_layers_where_all_are_needed():
    """The made-up target is linear in every layer of the source."""
    data = Splits(moments(related(900)), moments(related(300, seed=1)), SOURCE, TARGET)
    choice = select_layers(data, Recipe("auto", "auto", MapOptions(joint=True)))
    assert choice.k == 3
    assert choice.tried[3] > choice.tried[1] + 0.1


def test_automatic_k_leaves_rows_enough_for_every_input():
    """Three layers joint are 48 inputs, one is 16: at four rows each, 100 rows allow one."""
    counts = lambda *given: auto_counts(MapOptions(joint=True), (SOURCE, TARGET), *given)  # noqa: E731
    assert counts(100) == [1]
    assert counts(1000) == [1, 2, 3]
    assert counts(1000, 2) == [1, 2]


def test_a_recipe_reads_the_layers_of_the_tokens_before_that_are_kept(calibration):
    """Or those it is told to, where they are among them."""
    found = calibration("twin_llama")
    assert found.scope.lookback_layers == (0, 1)
    layers = tuple((0,) for _ in range(found.target.geometry.layers))
    default = fit.recipe("kvmap")
    for asked, read in (((), (0, 1)), ((0,), (0,)), ((1,), (1,))):
        options = dataclasses.replace(default.options, lookback_layers=asked)
        recipe = dataclasses.replace(default, options=options)
        made = pipeline.fit_map(found, layers, recipe, lambda *_: None).cmap
        assert made.options.lookback_layers == read
        assert made.provenance["recipe"]["options"]["lookback_layers"] == list(read)
    options = dataclasses.replace(default.options, lookback_layers=(0, 2))
    with pytest.raises(
        UsageError,
        match=r"keeps layers 0,1 of the tokens before, the map reads 0,2; "
        r"collect with `--lookback-layers 0,2`",
    ):
        pipeline.fit_map(found, layers, dataclasses.replace(default, options=options), print)


def test_all_presets_are_fitted_from_one_calibration():
    """So that fitting one after the other collects once."""
    kept = {
        collect_pair.with_scope(CollectOptions(), (SOURCE, TARGET), r) for r in fit.RECIPES.values()
    }
    assert {options.lookback_layers for options in kept} == {(0, 1)}
    assert len(kept) == 1


def test_what_is_planned_of_a_preset_is_what_a_fit_makes_of_it():
    """Before a fit says which layers of the tokens before are read, the usual ones count."""
    for preset in fit.RECIPES.values():
        made = fit.with_lookback(preset, first_and_middle(SOURCE))
        planned = weight_shape(preset.options, 1, SOURCE, TARGET)
        assert planned == weight_shape(made.options, 1, SOURCE, TARGET)


def test_layers_of_the_tokens_before_are_the_sources():
    with pytest.raises(UsageError, match=r"found layer 3 of the tokens before, .* 3 layers; give"):
        collect_pair.with_scope(CollectOptions(lookback_layers=(0, 3)), (SOURCE, TARGET))


@pytest.mark.parametrize("recipe", ["paper", "kvmap"])
def test_noise_is_not_fitted(recipe):
    """Nothing to learn: held-out R² is at most 0 for every layer but the anchor's own."""
    data = Splits(moments(noise(200)), moments(noise(200, seed=1)), SOURCE, TARGET)
    chosen = fit.with_lookback(fit.recipe(recipe), data.train.lookback_layers)
    layers = select_layers(data, chosen).layers
    _, scores = fit.fit_closed_form(data, layers, chosen.options, chosen.ridge)
    for kind in ("key", "value"):
        assert scores.mean("held_out", kind) <= 0.001


@pytest.mark.parametrize(
    "layers", [((0,), (1,)), ((0,), (1,), (2,), (2,)), ((0,), (1,), (3,)), ((0,), (), (1,))]
)
def test_layers_of_another_pair_are_refused(calibration, layers):
    with pytest.raises(UsageError, match=r"choice of layers is for another pair: found \d target"):
        pipeline.fit_map(calibration("twin_llama"), layers, RECIPE, lambda *_: None)


def test_head_counts_only_where_the_target_does_not_run_it(calibration):
    """A map with a native head is fitted without those rows, one without is fitted with them."""
    made = calibration("twin_llama")
    without, with_head = (splits(made, head).train.count for head in (4, 0))
    assert with_head == without + 4 * len(made.token_ids("train"))


def test_cached_layers_are_those_of_their_options(calibration, tmp_path, monkeypatch):
    monkeypatch.setenv("KVMAP_CACHE", str(tmp_path))
    made = calibration("twin_llama")
    one = pipeline.cached_layers(made, RECIPE, "top", None)
    again = pipeline.cached_layers(made, RECIPE, "top", None)
    other = pipeline.cached_layers(made, dataclasses.replace(RECIPE, k=2), "top", None)
    greedy = pipeline.cached_layers(made, RECIPE, "greedy", None)
    assert [found[2] for found in (one, again, other, greedy)] == [False, True, False, False]
    assert again[0].layers == one[0].layers
    assert len({found[1] for found in (one, other, greedy)}) == 3


def test_a_cached_choice_of_another_pair_is_made_again(calibration, tmp_path, monkeypatch):
    """One whose record lies too: in the cache folder nothing stands in a fit's way."""
    monkeypatch.setenv("KVMAP_CACHE", str(tmp_path))
    made = calibration("twin_llama")
    choice, path, _ = pipeline.cached_layers(made, RECIPE, "top", None)
    scores, layers, record = load_layers(path)
    few = {kind: table[:2] for kind, table in scores.held_out.items()}
    lies = [(LayerScores(few, few), layers[:2], {})]
    lies += [(scores, layers, {"tried": tried}) for tried in ({"x": 1}, {"1": "y"}, [1], None)]
    for lying, rows, change in lies:
        save_layers(path, lying, rows, record | change)
        again, _, known = pipeline.cached_layers(made, RECIPE, "top", None)
        assert (again.layers, known) == (choice.layers, False)
    assert pipeline.cached_layers(made, RECIPE, "top", None)[2]


def test_a_choice_that_is_written_anew_is_made_anew(calibration, tmp_path):
    """Where it goes is the user's to say; what lies there may be anything."""
    made, path = calibration("twin_llama"), tmp_path / "layers"
    choice, _, _ = pipeline.cached_layers(made, RECIPE, "top", path)
    scores, layers, record = load_layers(path)
    save_layers(path, scores, layers[::-1], record)
    again, _, known = pipeline.cached_layers(made, RECIPE, "top", path)
    assert (again.layers, known) == (choice.layers, False)
    assert load_layers(path)[1] == choice.layers


def test_map_tells_where_it_comes_from(calibration):
    made = calibration("twin_llama")
    layers = ((0,), (1,), (2,))
    cmap = pipeline.fit_map(made, layers, RECIPE, lambda *_: None).cmap
    assert isinstance(cmap, CacheMap)
    assert cmap.source == made.source
    assert cmap.provenance["calibration"] == made.digest
    assert cmap.provenance["text"] == {"dataset": "random"}
    assert "relative" in cmap.provenance["ridge_convention"]
    assert cmap.provenance["r2"]["held_out"]["key"] > 0.9999


def test_calibrations_in_other_dtypes_are_not_mistaken(pair_of_dtypes):
    """Rows rounded to bf16 give another map than fp32 ones."""
    assert pair_of_dtypes[0].digest != pair_of_dtypes[1].digest


@pytest.fixture
def pair_of_dtypes(loaded, tmp_path):
    made = []
    for dtype in ("float32", "bfloat16"):
        openers = tuple(lambda n=n, d=dtype: loaded(n, d) for n in ("qwen3_small", "llama_yarn"))
        options = CollectOptions(heads="matched", joint=False, dump=False)
        made.append(collect(openers, token_ids(2, 9), tmp_path / dtype, options, {}))
    assert torch.equal(made[0].token_ids("train"), made[1].token_ids("train"))
    return made
