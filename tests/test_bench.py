"""The bench: what it says and how it is asked, never how long anything took."""

import dataclasses
import importlib.util
import json
from dataclasses import replace

import pytest
import torch

from kvmap.bench import (
    BenchOptions,
    Clock,
    Timing,
    bench_pair,
    check_lengths,
    fitting,
    jobs_of,
    measure_machine,
    plot,
    timings,
)
from kvmap.bench import layered as layered_module
from kvmap.bench.against import check_engine
from kvmap.bench.alone import bench_map, growth
from kvmap.bench.costs import map_cost
from kvmap.bench.fitting import bench_fit
from kvmap.bench.layered import bench_layered, bench_random
from kvmap.bench.memory import peak_bytes
from kvmap.bench.pair import random_tokens
from kvmap.bench.plot import check_plotting
from kvmap.bench.shapes import random_map, random_model
from kvmap.bench.stream import bench_stream
from kvmap.cli import app
from kvmap.cli import bench as command
from kvmap.cli.bench_text import report
from kvmap.errors import FloorMissed, UsageError
from kvmap.fit import Recipe, describe, recipe
from kvmap.footprint import map_parameters
from kvmap.mapping import MapOptions

CPU = torch.device("cpu")
# The contract of the JSON report: keys may be added, never renamed.
CONTRACT = (
    *("tokens", "source_prefill_seconds", "map_seconds", "first_token_seconds"),
    *("target_prefill_seconds", "warm_speedup", "cold_speedup", "peak_bytes"),
)
EXACT = MapOptions(joint=True, anchor=True, exact_first=True, native_head=4, native_tail=3)


@pytest.fixture(scope="module")
def machine():
    return measure_machine(Clock(CPU, cpu_time=True), torch.float32)


@pytest.fixture(scope="module")
def measured(loaded, machine):
    source, target = loaded("qwen3_small"), loaded("llama_default")
    signatures = (source.signature, target.signature)
    cmap = random_map(signatures, Recipe(2, 0.0, EXACT), CPU, torch.float32)
    options = BenchOptions(repeats=2)
    return cmap, bench_pair(cmap, source, target, [16, 70], options, machine)


def test_median_and_percentile_are_those_of_the_rounds():
    timing = Timing((5.0, 1.0, 2.0))
    assert (timing.median, timing.p95, timing.spread) == (2.0, 5.0, 2.0)
    assert Timing(tuple(map(float, range(1, 101)))).p95 == 95.0


@pytest.mark.parametrize(("repeats", "calls"), [(1, 2), (3, 4)])
def test_rounds_are_as_many_as_asked_after_one_that_warms_up(repeats, calls):
    seen = []
    found = timings(lambda: seen.append(0) or {"part": float(len(seen))}, 100.0, repeats)
    assert len(seen) == calls
    assert found["part"].seconds == tuple(map(float, range(2, calls + 1)))


def test_a_slow_first_round_is_the_only_one_when_the_budget_is_spent():
    seen = []
    found = timings(lambda: seen.append(0) or {"part": 1.0}, budget=0.0)
    assert len(seen) == len(found["part"].seconds) == 1


def test_report_has_the_keys_of_the_contract(measured):
    for one in measured[1]:
        data = json.loads(json.dumps(one.to_json(), allow_nan=False))
        assert set(CONTRACT) <= set(data)
        assert data["handoff_seconds"] == pytest.approx(
            data["map_seconds"] + data["build_seconds"] + data["first_token_seconds"], rel=0.5
        )
        speedup = data["target_prefill_seconds"] / data["handoff_seconds"]
        assert data["warm_speedup"] == pytest.approx(speedup)
        assert data["cold_speedup"] < data["warm_speedup"]
        assert data["peak_bytes"] > data["extra_bytes"] > 0


def test_costs_are_those_of_the_shapes(measured):
    """Two of three layers mapped from two of three, keys and values, and the anchor's columns."""
    cmap, _ = measured
    inputs, outputs = 2 * 2 * 32 + 2 * 32, 32
    cost = map_cost(cmap, tokens=10, itemsize=2)
    assert cost.flops == 2 * 10 * 2 * 2 * inputs * outputs
    caches = (len(cmap.source_layers) + 3) * 2 * 10 * 32 * 2
    assert cost.bytes == caches + 2 * 2 * inputs * outputs * 4


def test_a_factor_that_keys_and_values_share_is_multiplied_once(pair):
    """Ranks of random maps: half of the outputs, a quarter for a tenth, as given, or whole."""
    signatures = tuple(model.signature for model in pair("image"))
    _, target = (signature.geometry for signature in signatures)
    joint = MapOptions(joint=True, anchor=True)
    for rank, share in ((0.01, 2), (0.1, 4), (5, None), (None, 0)):
        recipe = Recipe(3, 0.0, joint, rank=rank)
        cmap = random_map(signatures, recipe, CPU, torch.float32)
        layer = cmap.layers[0]
        inputs, outputs = layer.key.weight.shape[1], 2 * target.width
        held = inputs * outputs
        if share != 0:
            r = 5 if share is None else outputs // share
            assert (layer.shared, layer.key.weight.shape[2]) == (True, r)
            held = r * (inputs + outputs)
        assert map_cost(cmap, 10, 4).flops == 2 * 10 * target.layers * held
        assert cmap.parameters == map_parameters(recipe, 3, *(s.geometry for s in signatures))


def test_memory_is_the_peak_and_not_the_sum():
    def run():
        for _ in range(3):
            torch.zeros(1000, dtype=torch.float32).add(1.0)

    assert peak_bytes(run, CPU) == 8000
    held = torch.zeros(1000)
    assert peak_bytes(lambda: held.add_(1.0), CPU) == 0


SMALL = {
    "model_type": "qwen3",
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.fixture
def known(monkeypatch):
    """Make two small shapes known by name."""
    from kvmap import names

    monkeypatch.setitem(names.KNOWN, "one", ("nobody/one", SMALL))
    two = SMALL | {"num_hidden_layers": 10, "hidden_size": 48}
    monkeypatch.setitem(names.KNOWN, "two", ("nobody/two", two))
    return ("one", "two")


def test_random_models_have_the_published_shape(known):
    whole = random_model("two", CPU, torch.float32)
    assert whole.signature.geometry.layers == len(whole.signature.geometry.rope) == 10
    assert whole.signature.geometry.hidden_size == 48
    assert random_model("two", CPU, torch.float32, depth=1).signature.geometry.layers == 1


def test_what_does_not_fit_is_timed_by_one_layer_and_says_so(known, machine, monkeypatch):
    monkeypatch.setattr(layered_module, "fits_whole", lambda *_: False)
    chosen = Recipe(2, 0.0, EXACT)
    options = BenchOptions(repeats=1, cpu_time=True)
    (one,) = bench_random(known, chosen, [40], options, machine, torch.bfloat16)
    data = one.to_json()
    assert set(CONTRACT) <= set(data)
    assert data["prefill"].startswith("one layer × 5 and × 10, float")
    assert data["mapped"] == "4 of 10 layers from 2 of 5, × 2.5"
    assert data["products_share"] > 0


def test_layers_that_a_recipe_runs_natively_are_timed_mapped(known, machine, monkeypatch):
    monkeypatch.setattr(layered_module, "fits_whole", lambda *_: False)
    options = BenchOptions(repeats=1, cpu_time=True)
    for name, k, mapped in (("kvmap-native", 2, "4 of 10 layers from 2"), ("kvmap", 1, "4 of 10")):
        chosen = dataclasses.replace(recipe(name), k=k)
        (one,) = bench_random(known, chosen, [80], options, machine, torch.float32)
        assert one.to_json()["mapped"].startswith(mapped)


def test_what_fits_is_built_whole(known, machine):
    options = BenchOptions(repeats=1)
    (one,) = bench_random(known, recipe("cachebridge"), [40], options, machine, torch.float32)
    assert "prefill" not in one.to_json()
    (both,) = bench_layered(known, recipe("cachebridge"), [40], options, machine, torch.float32)
    assert both.record["map_flops"] == pytest.approx(one.record["map_flops"])


def test_pairs_recipes_and_directions_are_all_measured():
    jobs = jobs_of(None, "a, b", True, "paper,kvmap")
    assert [(job.names, job.recipe) for job in jobs] == [
        (("a", "b"), "paper"),
        (("a", "b"), "kvmap"),
        (("b", "a"), "paper"),
        (("b", "a"), "kvmap"),
    ]
    with pytest.raises(UsageError, match="found --pair 'a', expected two models"):
        jobs_of(None, "a", False, None)
    with pytest.raises(UsageError, match="no recipe 'soup'"):
        jobs_of(None, "a,b", False, "soup")


@pytest.mark.parametrize(
    ("provenance", "known"),
    [
        ({"recipe": describe(replace(recipe("kvmap-fast"), k=3))}, "kvmap-fast"),
        ({"recipe": describe(replace(recipe("kvmap"), ridge=0.5))}, "other"),
        ({}, None),
    ],
)
def test_a_map_by_its_file_is_of_the_recipe_that_it_was_fitted_by(
    measured, tmp_path, provenance, known
):
    path = replace(measured[0], provenance=provenance).save(tmp_path / "a.map")
    (job,) = jobs_of(path, "a,b", False, None)
    assert (job.path, job.recipe) == (path, known)


@pytest.mark.parametrize("given", ["", "1", "x", "128,,256", "-5"])
def test_lengths_that_are_none_are_refused(given):
    with pytest.raises(UsageError, match="expected numbers from 2"):
        command.parse_contexts(given)


def test_unknown_and_missing_engines_are_refused():
    with pytest.raises(UsageError, match="expected hf or vllm"):
        check_engine("abacus")
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(UsageError, match="pip install vllm"):
            check_engine("vllm")


def test_plot_is_drawn_or_says_what_is_missing(measured, tmp_path):
    rows = [{"recipe": "kvmap", **one.to_json()} for one in measured[1]]
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(UsageError, match=r"pip install 'kvmap\[plot\]'"):
            check_plotting()
    else:
        assert plot(rows, tmp_path / "latency.png").stat().st_size > 0


def test_floor_is_the_lowest_warm_speedup():
    document = {"contexts": [{"tokens": n, "warm_speedup": float(n)} for n in (5, 3)]}
    command._hold_floor(document, 3.0)
    with pytest.raises(FloorMissed, match=r"at 3 tokens is 3\.00, below --min-speedup 3\.5"):
        command._hold_floor(document, 3.5)


def test_command_prints_one_document_and_its_exit_code(known, capsys):
    arguments = ["bench", "--random-weights", "--pair", "one,two", "--recipe", "paper"]
    arguments += ["--context", "32", "--repeats", "1", "--device", "cpu"]
    with pytest.raises(SystemExit) as stop:
        app.main([*arguments, "--json", "--min-speedup", "1e9"])
    assert stop.value.code == 3
    document = json.loads(capsys.readouterr().out)
    assert set(CONTRACT) <= set(document["contexts"][0])
    with pytest.raises(SystemExit) as stop:
        app.main([*arguments, "--dry-run"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["one", "two", "paper", "32"]


def test_tokens_are_those_that_both_models_read(loaded):
    """Models of one tokenizer may have embeddings of different lengths."""
    large = loaded("qwen3_large")
    shape = dataclasses.replace(large.signature.geometry, vocabulary=7)
    signature = dataclasses.replace(large.signature, geometry=shape)
    small = dataclasses.replace(large, signature=signature)
    for readers in ((small, large), (large, small)):
        assert set(random_tokens(readers, 500, 0).unique().tolist()) == set(range(7))


def test_growth_is_the_exponent_of_each_map(measured):
    rows = [
        {
            "source": "s",
            "target": "t",
            "recipe": name,
            "tokens": n,
            "map_seconds": n**power / 7,
            "extra_bytes": 10 * n,
        }
        for name, power in (("one", 1.0), ("two", 1.5))
        for n in (4, 16, 64)
    ]
    rows.append({**rows[0], "recipe": "single"})
    found = growth(rows)
    assert [one["recipe"] for one in found] == ["one", "two"]
    assert [one["map_exponent"] for one in found] == pytest.approx([1.0, 1.5])
    assert found[0]["tokens"] == [4, 64]
    assert found[0]["extra_bytes"] == 640


def test_map_alone_is_timed_over_caches_of_any_length(measured, machine):
    cmap, _ = measured
    found = bench_map(cmap, [16, 300], BenchOptions(repeats=2), machine, torch.float32)
    assert [one["tokens"] for one in found] == [16, 300]
    for one in found:
        assert one["map_seconds"] > 0
        assert one["extra_bytes"] > 0
        assert one["rounds"] == 2
        assert one["products_share"] == one["products_seconds"] / one["map_seconds"]


def test_stream_leaves_the_last_chunk_and_the_tail(loaded, measured):
    cmap, _ = measured
    pair = (loaded("qwen3_small"), loaded("llama_default"))
    (one,) = bench_stream(cmap, *pair, [70], BenchOptions(repeats=1))
    assert one["left_seconds"] == pytest.approx(one["last_chunk_seconds"] + one["tail_seconds"])
    assert one["last_over_chunk"] > 0


@pytest.mark.parametrize("name", ["cachebridge", "kvmap-matched", "paper"])
def test_fit_is_timed_on_a_few_heads_of_one_layer(known, name):
    chosen, options = recipe(name), BenchOptions(repeats=1)
    one = bench_fit(known, chosen, 32, options, CPU, torch.float32)
    assert one["measured"] == f"1 of {10 - chosen.options.exact_layers} layers, 2 of 2 heads"
    share = one["accumulate_seconds_per_token"] / one["forward_seconds_per_token"]
    assert one["accumulate_share"] == pytest.approx(share)


def test_fit_whose_moments_do_not_fit_is_refused(known, monkeypatch):
    monkeypatch.setattr(fitting, "free_memory", lambda _: 1000)
    with pytest.raises(UsageError, match="moments of all heads would take 0 GB here"):
        bench_fit(known, recipe("paper"), 32, BenchOptions(repeats=1), CPU, torch.float32)


def test_contexts_beyond_the_positions_are_refused(known):
    with pytest.raises(
        UsageError, match="--context needs 257 positions, but one reads at most 256; "
    ):
        check_lengths(jobs_of(None, "one,two", False, None), [16, 257])


@pytest.mark.parametrize("part", ["map", "fit"])
def test_command_times_one_part(known, kvmap_run, part):
    arguments = ["bench", "--random-weights", "--pair", "one,two", "--recipe", "cachebridge"]
    arguments += ["--context", "16,32", "--repeats", "1", "--device", "cpu", "--only", part]
    code, out, _ = kvmap_run(*arguments, "--json")
    document = json.loads(out)
    assert code == 0
    assert len(document[part]) == (2 if part == "map" else 1)
    assert "GFLOP/s" in kvmap_run(*arguments)[1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--only", "soup"), "found --only 'soup', expected map or stream or fit"),
        (("--only", "map", "--min-speedup", "2"), "--only goes without --plot"),
        (("--only", "stream", "--random-weights"), "--only stream runs both models"),
        (("--context", "99999"), "but tiny-m reads at most 32768; give smaller ones"),
    ],
)
def test_command_refuses_what_it_cannot_time(kvmap_run, given, message):
    code, _, said = kvmap_run("bench", *given)
    assert code == 2
    assert message in said


def test_shares_that_no_machine_can_have_are_explained(measured, machine):
    document = {"machine": machine.to_json(), "maps": []}
    rows = [{"recipe": "kvmap", **one.to_json()} for one in measured[1]]
    said = "other work slowed the machine"
    assert said not in report({**document, "contexts": [{**rows[0], "matmul_share": 0.9}]})
    assert said in report({**document, "contexts": [{**rows[0], "matmul_share": 1.1}]})
