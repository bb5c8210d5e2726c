"""A target's lowest layers alone, and the two halves of a handoff that they make possible."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import checkpoints
import pytest
import torch
from conftest import token_ids

from kvmap import artifacts, fit
from kvmap.bench.shapes import random_map
from kvmap.cache import KVCache, load_cache, save
from kvmap.errors import UsageError
from kvmap.fit import Recipe
from kvmap.handoff import finish, handoff, map_context
from kvmap.mapping import MapOptions
from kvmap.models import generate, load_lowest, lowest_layers, prefill, save_lowest
from kvmap.transfer import prompt_ids

EXAMPLE = Path(__file__).parents[1] / "examples" / "two_servers.py"
BEST = fit.recipe("kvmap").options
OPTIONS = {
    "kvmap": dataclasses.replace(BEST, native_tail=8, tail_share=0.2),
    "native": dataclasses.replace(BEST, native_layers=2),
    "matched": MapOptions(heads="matched", anchor=True, native_head=1),
}


@pytest.fixture(scope="module")
def lowest(loaded, tmp_path_factory):
    """Return the lowest layers of a named tiny model, saved and read."""
    folder, made = tmp_path_factory.mktemp("lowest"), {}

    def get(name: str, count: int = 1):
        if (name, count) not in made:
            path = save_lowest(loaded(name), count, folder / f"{name}-{count}")
            made[name, count] = load_lowest(path, "cpu")
        return made[name, count]

    return get


def random_pair(loaded, options):
    """Return a source, a target and a map of random weights between them."""
    source, target = loaded("qwen3_small"), loaded("qwen3_large")
    torch.manual_seed(0)
    signatures = (source.signature, target.signature)
    recipe = Recipe(2, 0.0, options)
    return source, target, random_map(signatures, recipe, torch.device("cpu"), torch.float32)


def same(one: KVCache, other: KVCache) -> bool:
    pairs = zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", list(checkpoints.SUPPORTED))
def test_lowest_layers_are_those_of_the_whole_model_to_the_bit(loaded, lowest, name, count):
    """At any positions where tokens depend on themselves alone, behind a past where not."""
    ids, past = token_ids(2, 20), None
    if count > 1:
        past = prefill(loaded(name), token_ids(2, 5, seed=1))[0]
    positions = torch.arange(20).expand(2, -1) + (5 if past else 300)
    wanted = lowest_layers(loaded(name), ids, positions, count, past)
    found = lowest_layers(lowest(name, count), ids, positions, count, past)
    assert len(found) == 2 * count
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_another_dtype_is_that_of_the_model_loaded_in_it(checkpoint, loaded, tmp_path):
    """Frequencies stay as they are; only weights are rounded."""
    path = save_lowest(loaded("llama_llama3"), 2, tmp_path / "x")
    found, whole = load_lowest(path, "cpu", "bfloat16"), loaded("llama_llama3", "bfloat16")
    ids, positions = token_ids(1, 20), torch.arange(20)[None]
    pairs = zip(*(lowest_layers(m, ids, positions, 2) for m in (found, whole)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert found.dtype == torch.bfloat16


def test_the_file_holds_what_is_read_and_no_more(loaded, tmp_path):
    model = loaded("qwen3_large")
    names = set(artifacts.open_artifact(save_lowest(model, 2, tmp_path / "x")).names())
    below = {f"model.{n}" for n, _ in model.model.model.named_parameters() if "layers.0." in n}
    read = {
        f"model.layers.1.{part}.weight"
        for part in (
            "input_layernorm",
            *(f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")),
        )
    }
    buffers = {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}
    assert names == {"model.embed_tokens.weight"} | below | read | buffers


def test_it_passes_for_the_target_and_runs_no_further(lowest, loaded):
    found, whole = lowest("qwen3_large"), loaded("qwen3_large")
    assert found.signature == whole.signature
    ids = token_ids(1, 5)
    problem = r"qwen3_large: found the lowest 1 of its layers alone, expected "
    for run in (lambda: prefill(found, ids), lambda: generate(found, None, ids, 1)):
        with pytest.raises(UsageError, match=f"{problem}all; load the whole model"):
            run()
    with pytest.raises(UsageError, match=f"{problem}2; make them with this map"):
        lowest_layers(found, ids, torch.arange(5)[None], 2)


@pytest.mark.parametrize("count", [0, 5])
def test_layers_that_a_model_does_not_have_are_refused(loaded, tmp_path, count):
    with pytest.raises(UsageError, match=rf"found {count} lowest layers of .*, expected 1 to 4"):
        save_lowest(loaded("qwen3_large"), count, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_weights_that_are_not_in_memory_are_not_kept(lowest, tmp_path):
    """As where a model too large for the device is loaded spread."""
    spread = dataclasses.replace(lowest("qwen3_large"), lowest=None)
    with pytest.raises(UsageError, match=r"weights of model.layers.0.self_attn.o_proj are not in"):
        save_lowest(spread, 2, tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.fixture
def edited(loaded, tmp_path):
    """Return a file of lowest layers with tensors or header fields changed."""

    def write(tensors=None, **fields):
        made = artifacts.open_artifact(save_lowest(loaded("qwen3_small"), 1, tmp_path / "x"))
        kept = {n: t for n, t in (made.tensors() | (tensors or {})).items() if t is not None}
        return artifacts.write(tmp_path / "edited", "lowest", kept, made.metadata | fields)

    return write


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.rotary_emb.inv_freq",
    ],
)
def test_a_file_that_lacks_weights_is_refused(edited, name):
    """A product with what lies on the meta device is one of whatever stands in memory."""
    module = name.rpartition(".")[0]
    with pytest.raises(UsageError, match=rf"lacks the weights of {module}; run `kvmap lowest"):
        load_lowest(edited({name: None}), "cpu")


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "unheard.of"])
def test_weights_that_are_not_the_model_s_are_refused(edited, name):
    with pytest.raises(UsageError, match=rf"'{name}' is no weight of its model, or of another"):
        load_lowest(edited({name: torch.zeros(3)}), "cpu")


def test_headers_that_make_no_model_are_refused(edited, loaded):
    config = loaded("qwen3_small").model.config.to_dict()
    with pytest.raises(UsageError, match=r"the lowest's header is not sound \(KeyError"):
        load_lowest(edited(model={}), "cpu")
    with pytest.raises(UsageError, match=r"its config makes no model here \(ValueError\)"):
        load_lowest(edited(config={"model_type": "zzz"}), "cpu")
    larger = {**config, "dtype": "float32", "vocab_size": 10**12}
    with pytest.raises(UsageError, match=r"its config is not that of its model"):
        load_lowest(edited(config=larger), "cpu")


def test_files_of_another_kind_cut_short_or_newer_are_refused(loaded, tmp_path, monkeypatch):
    model = loaded("qwen3_small")
    path = save(prefill(model, token_ids(1, 4))[0], tmp_path / "c", model.signature)
    with pytest.raises(UsageError, match=r"is a cache file, where a lowest was expected"):
        load_lowest(path, "cpu")
    whole = save_lowest(model, 1, tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"x: .*damaged.*; run `kvmap lowest MAP -o LOWEST`"):
        load_lowest(tmp_path / "x", "cpu")

    with monkeypatch.context() as patch:
        patch.setattr("kvmap.header.VERSION", 2)
        save_lowest(model, 1, tmp_path / "x")
    with pytest.raises(UsageError, match=r"x: has format version 2, newer than this kvmap's 1"):
        load_lowest(tmp_path / "x", "cpu")


# --- the two halves of a handoff


@pytest.mark.parametrize("name", OPTIONS)
def test_two_halves_through_a_file_are_the_handoff_to_the_bit(loaded, lowest, tmp_path, name):
    source, target, cmap = random_pair(loaded, OPTIONS[name])
    ids = token_ids(2, 60)
    own, _ = prefill(source, ids)
    whole = handoff(cmap, target, own, ids)
    mapped = map_context(cmap, lowest("qwen3_large", cmap.options.read_layers), own, ids)
    assert mapped.tokens == 60 - cmap.options.tail_length(60)
    save(mapped, tmp_path / "c", cmap.target)
    read, signature = load_cache(tmp_path / "c")
    done = finish(target, read, ids, cmap.options.native_head)
    assert signature.digest == target.signature.digest
    assert torch.equal(done.logits, whole.logits)
    assert same(done.cache, whole.cache)
    assert torch.equal(done.cache.positions, whole.cache.positions)
    assert done.outcome == whole.outcome == "applied"
    assert set(done.seconds) == {"build", "head", "tail"}


def test_halves_of_a_padded_batch_are_the_handoff(loaded, lowest):
    source, target, cmap = random_pair(loaded, MapOptions(anchor=True, exact_first=True))
    ids, mask = token_ids(2, 32), torch.ones(2, 32, dtype=torch.bool)
    mask[1, :9] = False
    own, _ = prefill(source, ids, mask=mask)
    whole = handoff(cmap, target, own, ids)
    done = finish(target, map_context(cmap, lowest("qwen3_large"), own, ids), ids, 0)
    assert torch.equal(done.logits, whole.logits)
    assert torch.equal(done.cache.mask, whole.cache.mask)


def test_the_head_is_the_target_s_own_whatever_was_mapped(loaded, lowest):
    source, target, cmap = random_pair(loaded, OPTIONS["kvmap"])
    ids = token_ids(1, 40)
    mapped = map_context(cmap, lowest("qwen3_large"), prefill(source, ids)[0], ids)
    head, native = finish(target, mapped, ids, 4).cache.slice(0, 4), prefill(target, ids[:, :4])[0]
    assert same(head, native)
    assert not torch.equal(mapped.keys[1][:, :, :4], head.keys[1])


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_a_context_with_nothing_to_map_ships_an_empty_cache(loaded, lowest, tmp_path, tokens):
    source, target, cmap = random_pair(loaded, OPTIONS["kvmap"])
    ids = token_ids(2, tokens)
    mapped = map_context(cmap, lowest("qwen3_large"), prefill(source, ids)[0], ids)
    read, _ = load_cache(save(mapped, tmp_path / "c", cmap.target))
    done = finish(target, read, ids, 4)
    assert (read.tokens, done.outcome) == (0, "fallback_reprefill")
    assert torch.equal(done.logits, prefill(target, ids)[1][:, -1])


def test_library_maps_with_the_lowest_layers_as_with_the_target(loaded, lowest):
    source, target, cmap = random_pair(loaded, OPTIONS["native"])
    own, _ = prefill(source, token_ids(1, 20))
    found = cmap.map(own, target=lowest("qwen3_large", 2))
    for one, other in zip(found.layers, cmap.map(own, target=target).layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)


def test_a_mapped_cache_that_does_not_fit_is_refused(loaded, lowest):
    source, target, cmap = random_pair(loaded, OPTIONS["kvmap"])
    ids = token_ids(1, 40)
    own, _ = prefill(source, ids)
    mapped = map_context(cmap, lowest("qwen3_large"), own, ids)
    with pytest.raises(UsageError, match=r"the mapped cache: found 3 layers, expected 4"):
        finish(target, own, ids, 4)
    with pytest.raises(UsageError, match=r"has 32 tokens, expected fewer than the context's 32"):
        finish(target, mapped, ids[:, :32], 4)
    with pytest.raises(UsageError, match=r"mapped cache was made from other tokens.*; map the c"):
        finish(target, mapped, token_ids(1, 40, seed=3), 4)


# --- from the command line


@pytest.fixture
def saved(loaded, tmp_path):
    """Return a map's file and the file of the lowest layers that it reads."""
    _, target, cmap = random_pair(loaded, OPTIONS["kvmap"])
    return cmap.save(tmp_path / "a.map"), save_lowest(target, 1, tmp_path / "a.lowest")


def test_the_command_writes_what_the_map_reads(kvmap_run, saved, tmp_path):
    made = tmp_path / "b.lowest"
    code, out, error = kvmap_run("lowest", saved[0], "-o", made, "--json")
    assert code == 0, error
    document = json.loads(out)
    assert (document["lowest"], document["layers"]) == (str(made), 1)
    assert document["bytes"] == made.stat().st_size < document["model_bytes"]
    assert "1 of 4 layers: " in error
    assert made.read_bytes() == saved[1].read_bytes()
    code, out, error = kvmap_run("lowest", saved[0], "-o", made)
    assert (code, out, "exists already; pass --force" in error) == (2, "", True)
    assert json.loads(kvmap_run("show", made, "--json")[1])["kind"] == "lowest"


def test_a_context_is_mapped_where_the_target_is_not(kvmap_run, loaded, saved, tmp_path):
    source, target, cmap = random_pair(loaded, OPTIONS["kvmap"])
    prompt, out = "some bytes that a model with random weights reads", tmp_path / "out.cache"
    arguments = ["transfer", saved[0], "--prompt", prompt, "--lowest", saved[1], "-o", out]
    # Named after its folder, which is now nowhere.
    away = dataclasses.replace(cmap.target, name=str(tmp_path / "nowhere"))
    dataclasses.replace(cmap, target=away).save(saved[0])
    code, made, error = kvmap_run(*arguments)
    assert (code, made) == (0, f"{out}\n"), error
    ids = prompt_ids(source.tokenizer, prompt)
    mapped, signature = load_cache(out)
    assert f"mapped: {mapped.tokens} tokens" in error
    whole = handoff(cmap, target, prefill(source, ids)[0], ids)
    assert signature.digest == target.signature.digest
    assert torch.equal(finish(target, mapped, ids, 4).logits, whole.logits)

    own = save(prefill(source, ids)[0], tmp_path / "own.cache", source.signature)
    arguments[2:4] = ["--cache", own]
    assert kvmap_run(*arguments, "--force")[0] == 0
    assert same(load_cache(out)[0], mapped)


def test_lowest_layers_take_no_options_of_the_whole_target(kvmap_run, saved):
    for option in (["--generate", 2], ["--target", "x"]):
        arguments = ["transfer", saved[0], "--prompt", "a b", "--lowest", saved[1], "-o", "x"]
        code, _, error = kvmap_run(*arguments, *option)
        assert (code, f"{option[0]} is of the whole target, --lowest" in error) == (2, True)


def test_lowest_layers_of_another_model_are_refused(kvmap_run, loaded, saved, tmp_path):
    other = save_lowest(loaded("llama_default"), 1, tmp_path / "other")
    arguments = ["transfer", saved[0], "--prompt", "a b", "--lowest", other, "-o", tmp_path / "x"]
    code, _, error = kvmap_run(*arguments)
    assert (code, "the map's target is " in error) == (2, True)


def test_two_servers_say_what_one_process_says(saved, tmp_path, capsys):
    """Each server is a process of its own; the example ends with an error where they differ."""
    spec = importlib.util.spec_from_file_location("two_servers", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    prompt = tmp_path / "prompt"
    prompt.write_text("some bytes that a model with random weights reads")
    example.main(str(saved[0]), str(prompt), "6")
    printed = capsys.readouterr().out
    layers, whole = map(int, re.findall(r"(\d+) bytes", printed.splitlines()[0]))
    assert layers < whole / 2
    assert "two servers: " in printed
