"""A target's lowest layers alone, and the two halves of a handoff that they make possible."""

import contextlib
import copy
import dataclasses
import importlib.util
import io
import json
import re
from pathlib import Path

import checkpoints
import pytest
import torch
from conftest import token_ids

from kvmap import artifacts, fit
from kvmap.bench.shapes import random_map
from kvmap.cache import KVCache, load_cache, load_mapped, save
from kvmap.errors import UsageError
from kvmap.fit import Recipe
from kvmap.handoff import finish, handoff, map_context
from kvmap.mapping import CacheMap, MapOptions
from kvmap.models import generate, load_lowest, lowest_layers, prefill, save_lowest
from kvmap.models import lowest as lowest_module
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
    for changed in ({"rms_norm_eps": 1e30}, {"rope_parameters": {"rope_theta": 5.0}}):
        with pytest.raises(UsageError, match=r"its config is not that of its model"):
            load_lowest(edited(config={**config, **changed}), "cpu")


def test_how_to_compute_is_not_taken_from_a_file(edited, loaded):
    """One way of attention would be fetched from the hub, as code."""
    config = loaded("qwen3_small").model.config.to_dict()
    config |= {"attn_implementation": "someone/kernels", "experts_implementation": "x"}
    model = load_lowest(edited(config=config), "cpu").model
    assert model.config._attn_implementation == "sdpa"


def test_weights_of_another_type_are_refused(edited, loaded):
    name = "model.layers.0.self_attn.k_proj.weight"
    held = dict(loaded("qwen3_small").model.named_parameters())[name]
    with pytest.raises(UsageError, match=r"k_proj.weight' is no weight of its model, or of an"):
        load_lowest(edited({name: held.int()}), "cpu")


def test_lowest_layers_of_another_target_are_refused_before_any_model_is_made(
    loaded, tmp_path, monkeypatch
):
    path = save_lowest(loaded("qwen3_small"), 1, tmp_path / "x")
    monkeypatch.setattr(lowest_module, "_shell", None)
    with pytest.raises(
        UsageError, match=r"the map's target is .*qwen3_large .* found .*qwen3_small"
    ):
        load_lowest(path, "cpu", expected=loaded("qwen3_large").signature)


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
    with pytest.raises(UsageError, match=r"the mapped cache: found 3 layers of keys, expected 4"):
        finish(target, own, ids, 4)
    with pytest.raises(UsageError, match=r"has 32 tokens, expected fewer than the context's 32"):
        finish(target, mapped, ids[:, :32], 4)
    with pytest.raises(UsageError, match=r"mapped cache was made from other tokens.*; map the c"):
        finish(target, mapped, token_ids(1, 40, seed=3), 4)
    for head in (-1, mapped.tokens):
        with pytest.raises(UsageError, match=rf"found a native head of {head} tokens, expected"):
            finish(target, mapped, ids, head)
    later = dataclasses.replace(mapped, positions=mapped.positions + 50)
    with pytest.raises(UsageError, match=r"the mapped cache begins at position 50, but this map"):
        finish(target, later, ids, 4)
    padded = dataclasses.replace(mapped, mask=torch.zeros_like(mapped.positions, dtype=torch.bool))
    with pytest.raises(UsageError, match=r"the mapped cache is padded, but this map has the"):
        finish(target, padded, ids, 4)
    with pytest.raises(UsageError, match=r"mask is torch.int64, expected torch.bool"):
        finish(target, dataclasses.replace(mapped, mask=mapped.positions), ids, 4)
    with pytest.raises(UsageError, match=r"found tokens \[2, 40\], expected \[1, tokens\] as of"):
        finish(target, mapped, token_ids(2, 40), 4)


@pytest.mark.parametrize("count", [1, 2])
def test_lowest_layers_read_tokens_of_the_vocabulary_alone(lowest, count):
    ids = token_ids(1, 5)
    ids[0, 2] = checkpoints.VOCABULARY
    with pytest.raises(UsageError, match=r"found token id 260, expected 0 to 259"):
        lowest_layers(lowest("qwen3_large", count), ids, torch.arange(5)[None], count)


def test_layers_of_another_model_are_not_read_as_the_target_s(loaded):
    source, _, cmap = random_pair(loaded, OPTIONS["kvmap"])
    ids = token_ids(1, 40)
    with pytest.raises(UsageError, match=r"the map's target is .*found"):
        map_context(cmap, source, prefill(source, ids)[0], ids)


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
    mapped, signature, head = load_mapped(out)
    assert head == 4
    assert f"mapped: {mapped.tokens} tokens" in error
    whole = handoff(cmap, target, prefill(source, ids)[0], ids)
    assert signature.digest == target.signature.digest
    assert torch.equal(finish(target, mapped, ids, 4).logits, whole.logits)

    own = save(prefill(source, ids)[0], tmp_path / "own.cache", source.signature)
    arguments[2:4] = ["--cache", own]
    code, made, _ = kvmap_run(*arguments, "--force", "--json")
    assert (code, json.loads(made)["native_head"]) == (0, 4)
    assert same(load_mapped(out)[0], mapped)
    with pytest.raises(UsageError, match="is a whole cache, expected a mapped one"):
        load_mapped(own)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda ids, at: (ids.index_fill(1, torch.tensor([9]), 10**12), at), "found token id 1000"),
        (lambda ids, at: (ids - 300, at), "found token id -"),
        (lambda ids, at: (ids, at.flip(1)), "do not stand at positions 0 to 39 one by one"),
        (lambda ids, at: (ids.double(), at), "token_ids is torch.float64, expected torch.int64"),
    ],
    ids=["large", "negative", "reversed", "float"],
)
@pytest.mark.parametrize("part", ["lowest", "whole"])
def test_a_saved_cache_of_no_such_tokens_is_one_sentence(
    kvmap_run, loaded, saved, tmp_path, part, changed, said
):
    source, path = loaded("qwen3_small"), tmp_path / "own.cache"
    save(prefill(source, token_ids(1, 40))[0], path, source.signature)
    held = artifacts.open_artifact(path)
    tensors = held.tensors()
    ids, positions = changed(tensors["token_ids"], tensors["positions"])
    tensors |= {"token_ids": ids, "positions": positions}
    artifacts.write(path, "cache", tensors, held.metadata)
    line = ["transfer", saved[0], "--cache", path, "-o", tmp_path / "out"]
    code, out, error = kvmap_run(*line, *(["--lowest", saved[1]] if part == "lowest" else []))
    assert said in error
    assert (code, out, "unexpected" in error) == (2, "", False)
    assert not (tmp_path / "out").exists()


def test_a_cache_that_is_to_be_finished_passes_for_no_whole_one(kvmap_run, saved, tmp_path):
    """Its head is mapped badly and its tail missing: what goes on from it goes on from neither."""
    out = tmp_path / "out.cache"
    line = ["transfer", saved[0], "--prompt", "some bytes that are long enough", "-o", out]
    assert kvmap_run(*line, "--lowest", saved[1])[0] == 0
    with pytest.raises(UsageError, match="is a mapped cache without its native head and tail"):
        load_cache(out)
    code, _, error = kvmap_run("transfer", saved[0], "--cache", out, "--generate", 2)
    assert (code, "let `kvmap.handoff.finish` run them" in error) == (2, True)
    code, _, error = kvmap_run(
        "transfer", saved[0], "--prompt", "a b", "--lowest", saved[1], "-o", out, "-f"
    )
    assert code == 0
    assert "nothing to map: the context is no longer than head and tail" in error


def test_what_is_read_is_not_written_over_even_by_force(kvmap_run, saved, tmp_path):
    before = [path.read_bytes() for path in saved]
    line = ["transfer", saved[0], "--prompt", "a b", "--lowest", saved[1], "--force", "-o"]
    for arguments in (
        [*line, saved[0]],
        [*line, saved[1]],
        ["lowest", saved[0], "-f", "-o", saved[0]],
    ):
        code, _, error = kvmap_run(*arguments)
        assert (code, "is what is read; choose another path" in error) == (2, True)
    assert [path.read_bytes() for path in saved] == before


def test_a_source_that_is_not_run_is_not_named(kvmap_run, saved, tmp_path):
    arguments = ["transfer", saved[0], "--cache", "x", "--source", "y", "-o", tmp_path / "z"]
    code, _, error = kvmap_run(*arguments)
    assert (code, "--source is not run where --cache is given" in error) == (2, True)


def test_a_map_that_reads_no_layer_has_nothing_to_keep(kvmap_run, loaded, tmp_path):
    """That is said before the target is loaded, which may be away."""
    _, _, cmap = random_pair(loaded, MapOptions())
    away = dataclasses.replace(cmap.target, name=str(tmp_path / "nowhere"))
    path = dataclasses.replace(cmap, target=away).save(tmp_path / "none.map")
    code, _, error = kvmap_run("lowest", path, "-o", tmp_path / "none.lowest")
    assert (code, "so there is nothing to keep" in error) == (2, True)


def test_a_map_of_native_layers_alone_keeps_all_of_them(kvmap_run, loaded, tmp_path):
    """It reads nothing of the source, and maps as any other."""
    source, target, _ = random_pair(loaded, MapOptions())
    options, signatures = MapOptions(native_layers=4), (source.signature, target.signature)
    path = CacheMap(*signatures, (None,) * 4, options).save(tmp_path / "native.map")
    made = tmp_path / "native.lowest"
    code, _, error = kvmap_run("lowest", path, "-o", made)
    assert (code, "4 of 4 layers: " in error) == (0, True)
    ids = token_ids(1, 20)
    mapped = map_context(CacheMap.load(path), load_lowest(made), prefill(source, ids)[0], ids)
    torch.testing.assert_close(
        finish(target, mapped, ids, 0).logits, prefill(target, ids)[1][:, -1], atol=1e-4, rtol=0
    )


def test_a_config_of_code_of_its_own_is_not_kept(loaded, tmp_path):
    target = loaded("qwen3_large")
    own = type(target.model.config)
    config = type("Ours", (own,), {"model_type": "ours"}).from_dict(target.model.config.to_dict())
    model = copy.copy(target.model)
    model.config = config
    with pytest.raises(UsageError, match="its config takes code of its own"):
        save_lowest(dataclasses.replace(target, model=model), 1, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_lowest_layers_take_no_options_of_the_whole_target(kvmap_run, saved):
    for option in (["--generate", 2], ["--target", "x"]):
        arguments = ["transfer", saved[0], "--prompt", "a b", "--lowest", saved[1], "-o", "x"]
        code, _, error = kvmap_run(*arguments, *option)
        assert (code, f"{option[0]} is of the whole target, --lowest" in error) == (2, True)


def test_lowest_layers_of_another_model_are_refused(kvmap_run, loaded, saved, tmp_path):
    other = save_lowest(loaded("llama_default"), 1, tmp_path / "other")
    arguments = ["transfer", saved[0], "--prompt", "a b", "--lowest", other, "-o", tmp_path / "x"]
    code, _, error = kvmap_run(*arguments)
    assert code == 2
    assert f"{other}: the map's target is" in error
    assert "; run `kvmap lowest` on this map" in error


@pytest.fixture
def example():
    """Return the example of two servers as a module."""
    spec = importlib.util.spec_from_file_location("two_servers", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_servers_say_what_one_process_says(example, saved, tmp_path, capsys):
    """Each server is a process of its own; the example ends with an error where they differ."""
    prompt = tmp_path / "prompt"
    prompt.write_text("some bytes that a model with random weights reads")
    example.main(str(saved[0]), str(prompt), 6)
    printed = capsys.readouterr().out
    layers, whole = map(int, re.findall(r"(\d+) bytes", printed.splitlines()[0]))
    assert layers < whole / 2
    assert "two servers: " in printed


@pytest.mark.parametrize("text", ["", "a", "a b", "a b c", "a b c d", "a b c d e"])
def test_two_servers_take_a_prompt_of_any_length_or_say_a_sentence(
    example, saved, tmp_path, capsys, monkeypatch, text
):
    """The bytes are the tokens: none, 1, and around the head of 4 and the tail of 1."""

    def here(role, *arguments):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            example.SERVERS[role](*map(str, arguments))
        return said.getvalue().strip()

    monkeypatch.setattr(example, "run_server", here if len(text) > 1 else None)
    prompt = tmp_path / "prompt"
    prompt.write_text(text)
    if len(text) > 1:
        example.main(str(saved[0]), str(prompt), 2)
        assert "one process: " in capsys.readouterr().out
        return
    with pytest.raises(UsageError, match=rf"the prompt has {len(text)} tokens, expected at least"):
        example.main(str(saved[0]), str(prompt), 2)


def test_a_server_that_fails_is_told_without_a_traceback(example):
    with pytest.raises(SystemExit, match="the source's server has failed"):
        example.run_server("source", "absent.map", "absent", "absent", "absent")
