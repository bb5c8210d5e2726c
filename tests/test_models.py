"""Running models: every result is compared with transformers alone, run without a cache."""

import shutil
from types import SimpleNamespace

import checkpoints
import oracles
import pytest
import torch
import transformers
from conftest import token_ids
from safetensors.torch import load_file, save_file

from kvmap.errors import UsageError
from kvmap.models import (
    continue_logits,
    first_layer,
    from_dynamic_cache,
    generate,
    load,
    prefill,
    probe,
    resolve,
    to_dynamic_cache,
)
from kvmap.models.configs import load_config
from kvmap.models.devices import pick_dtype

NAMES = list(checkpoints.SUPPORTED)
TOLERANCE = 1e-4  # absolute, on fp32 logits whose spread is about 1


def apart(first: torch.Tensor, second: torch.Tensor) -> float:
    assert first.shape == second.shape
    return float((first - second).abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_prefill_is_the_models_own_run(loaded, native, name):
    ids = token_ids(2, 40)
    cache, logits = prefill(loaded(name), ids)
    keys, values = oracles.native_cache(native(name), ids)
    assert apart(logits[:, -1], oracles.native_logits(native(name), ids)[:, -1]) < TOLERANCE
    assert all(apart(*pair) < TOLERANCE for pair in zip(cache.keys, keys, strict=True))
    assert all(apart(*pair) < TOLERANCE for pair in zip(cache.values, values, strict=True))
    assert torch.equal(cache.token_ids, ids)
    assert cache.positions.tolist() == [list(range(40))] * 2


@pytest.mark.parametrize("name", NAMES)
def test_identity_own_cache_gives_own_logits(loaded, native, name):
    """Must hold: fp32 to 1e-4 absolute. Ministral's query scaling sets in at 16 and 32 tokens."""
    ids = token_ids(2, 48)
    cache, _ = prefill(loaded(name), ids[:, :30])
    logits = continue_logits(loaded(name), cache, ids[:, 30:])
    assert apart(logits, oracles.native_logits(native(name), ids)[:, 30:]) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_of_other_text_does_not_give_own_logits(loaded, native, name):
    """The identity test can fail on every one of these models."""
    ids = token_ids(2, 48)
    cache, _ = prefill(loaded(name), token_ids(2, 30, seed=5))
    logits = continue_logits(loaded(name), cache, ids[:, 30:])
    assert apart(logits, oracles.native_logits(native(name), ids)[:, 30:]) > 0.1


@pytest.mark.parametrize("name", ["qwen3_small", "llama_llama3", "llama_yarn", "ministral3"])
def test_prefill_in_pieces_is_prefill_at_once(loaded, name):
    ids = token_ids(2, 40)
    whole, expected = prefill(loaded(name), ids)
    first, _ = prefill(loaded(name), ids[:, :17])
    before = [key.clone() for key in first.keys]
    pieces, logits = prefill(loaded(name), ids[:, 17:], past=first)
    assert pieces.tokens == 40
    assert torch.equal(pieces.positions, whole.positions)
    assert torch.equal(pieces.token_ids, ids)
    assert apart(logits, expected) < TOLERANCE
    assert all(apart(*pair) < TOLERANCE for pair in zip(pieces.keys, whole.keys, strict=True))
    assert first.tokens == 17
    assert all(torch.equal(*pair) for pair in zip(first.keys, before, strict=True))


def test_continuing_twice_from_one_cache_gives_the_same(loaded):
    """The cache is read, never extended."""
    model, ids = loaded("qwen3_small"), token_ids(1, 30)
    cache, _ = prefill(model, ids[:, :20])
    first = continue_logits(model, cache, ids[:, 20:])
    assert torch.equal(first, continue_logits(model, cache, ids[:, 20:]))
    assert cache.keys[0].shape[2] == cache.tokens == 20


@pytest.mark.parametrize("covered", [None, 1, 20, 39, 40])
@pytest.mark.parametrize("name", ["qwen3_small", "llama_default", "llama_yarn", "ministral3"])
def test_generate_is_greedy_decoding_without_any_cache(loaded, native, name, covered):
    """At 40 the cache covers the whole prompt, which transformers would read twice."""
    ids = token_ids(1, 40)
    cache = None if covered is None else prefill(loaded(name), ids[:, :covered])[0]
    found = generate(loaded(name), cache, ids, 8)
    assert torch.equal(found, oracles.native_greedy(native(name), ids, 8))


def test_padded_rows_go_on_as_if_alone(loaded, native):
    """What is a pad is known from the cache's mask."""
    name, real, pads = "llama_llama3", 23, 9
    own = token_ids(1, real + 2, seed=3)
    ids = torch.cat((torch.cat((torch.zeros(1, pads).long(), own), 1), token_ids(1, 34)))
    mask = torch.ones(2, 32, dtype=torch.bool)
    mask[0, :pads] = False
    cache, _ = prefill(loaded(name), ids[:, :32], mask=mask)
    found = generate(loaded(name), cache, ids, 6)
    assert torch.equal(found[:1], oracles.native_greedy(native(name), own, 6))
    assert torch.equal(found[1:], oracles.native_greedy(native(name), ids[1:], 6))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["qwen3_small", "llama_llama3", "ministral3", "glm4_interleaved"])
def test_padded_rows_run_as_if_alone(loaded, native, name, side):
    real, pads, total = 23, 9, 32
    ids = token_ids(2, total)
    ids[0, :] = 0
    own = token_ids(1, real, seed=3)
    place = slice(pads, total) if side == "left" else slice(0, real)
    ids[0, place] = own
    mask = torch.zeros(2, total, dtype=torch.bool)
    mask[0, place], mask[1] = True, True
    cache, _ = prefill(loaded(name), ids, mask=mask)
    keys, values = oracles.native_cache(native(name), own)
    for layer in range(cache.layers):
        assert apart(cache.keys[layer][:1, :, place], keys[layer]) < TOLERANCE
        assert apart(cache.values[layer][:1, :, place], values[layer]) < TOLERANCE

    more = token_ids(2, 6, seed=4)
    logits = continue_logits(loaded(name), cache, more)
    alone = oracles.native_logits(native(name), torch.cat((own, more[:1]), 1))[:, real:]
    full = oracles.native_logits(native(name), torch.cat((ids[1:], more[1:]), 1))[:, total:]
    assert apart(logits[:1], alone) < TOLERANCE
    assert apart(logits[1:], full) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_first_layer_is_layer_0_of_a_prefill(loaded, native, name):
    """At any positions, and without a trace in the model."""
    ids = token_ids(2, 20)
    positions = torch.stack((torch.arange(20), torch.arange(20) + 300))
    found_keys, found_values = first_layer(loaded(name), ids, positions)
    keys, values = oracles.native_cache(native(name), ids, positions)
    assert apart(found_keys, keys[0]) < 1e-5
    assert apart(found_values, values[0]) < 1e-5
    logits = continue_logits(loaded(name), prefill(loaded(name), ids[:, :10])[0], ids[:, 10:])
    assert apart(logits, oracles.native_logits(native(name), ids)[:, 10:]) < TOLERANCE


@pytest.mark.parametrize("found", [-1, checkpoints.VOCABULARY, 2**62])
def test_tokens_outside_the_vocabulary_are_one_sentence(loaded, found):
    """A GPU would stop at them for good, whatever runs next."""
    model, ids = loaded("qwen3_small"), token_ids(1, 6)
    ids[0, 2] = found
    said = rf"qwen3_small: found token id {found}, expected 0 to {checkpoints.VOCABULARY - 1}; take"
    for run in (
        lambda: prefill(model, ids),
        lambda: generate(model, None, ids, 2),
        lambda: first_layer(model, ids, torch.arange(6)[None]),
    ):
        with pytest.raises(UsageError, match=said):
            run()


def test_dynamic_cache_holds_the_same_memory(loaded):
    model = loaded("llama_default")
    cache, _ = prefill(model, token_ids(1, 10))
    built = to_dynamic_cache(cache, model)
    assert built.get_seq_length() == 10
    assert all(layer.keys is key for layer, key in zip(built.layers, cache.keys, strict=True))
    back = from_dynamic_cache(built, cache.positions, cache.token_ids, None)
    assert all(a is b for a, b in zip(back.values, cache.values, strict=True))


@pytest.mark.parametrize("name", list(checkpoints.REFUSED))
def test_caches_that_cannot_be_mapped_are_refused_by_name(checkpoint, name):
    word = checkpoints.REFUSED[name][2]
    with pytest.raises(UsageError, match=f"(?s){name}.*{word}") as caught:
        load(str(checkpoint(name)), device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", list(checkpoints.REFUSED))
def test_refusal_comes_before_any_weight_is_read(checkpoint, tmp_path, name):
    shutil.copytree(checkpoint(name), tmp_path / name)
    (tmp_path / name / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=checkpoints.REFUSED[name][2]):
        load(str(tmp_path / name), device="cpu")


def test_a_rotation_kvmap_cannot_undo_is_refused(checkpoint, monkeypatch):
    """The probe compares with the model's own key, so a changed rotation is caught."""
    from transformers.models.llama import modeling_llama

    original = modeling_llama.apply_rotary_pos_emb

    def crooked(q, k, cos, sin, *args, **kwargs):
        q, k = original(q, k, cos, sin, *args, **kwargs)
        return q, k + 0.01 * k.flip(-1)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", crooked)
    with pytest.raises(UsageError, match=r"llama_default.*layer 0.*misses the model's own key"):
        load(str(checkpoint("llama_default")), device="cpu")


def test_a_model_without_attention_or_rotation_of_known_names_is_refused(loaded, monkeypatch):
    model = loaded("llama_default").model
    monkeypatch.setattr(probe, "attention_modules", lambda _: {})
    with pytest.raises(UsageError, match="no attention layers in a model of type llama"):
        probe.probe_rope(model, "one")
    named, keys = SimpleNamespace(named_modules=lambda: [("rotor", model)]), torch.ones(1, 2, 16, 8)
    with pytest.raises(UsageError, match="layer 0: found no module named rotary_emb"):
        probe._match(named, keys, keys, torch.arange(16), "layer 0")


def test_a_rotation_under_another_name_is_not_taken_for_none(checkpoint, monkeypatch):
    """Keys that never reach a rotation kvmap knows may still carry their position."""
    from transformers.models.llama import modeling_llama

    original = modeling_llama.apply_rotary_pos_emb
    forward = modeling_llama.LlamaAttention.forward

    def renamed(self, *args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(modeling_llama, "apply_rotary_pos_emb", original)
            return forward(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", renamed)
    with pytest.raises(UsageError, match="llama_default"):
        load(str(checkpoint("llama_default")), device="cpu")


def test_loading_leaves_transformers_as_it_was(checkpoint):
    from transformers.models.llama import modeling_llama

    before = modeling_llama.apply_rotary_pos_emb
    model = load(str(checkpoint("llama_default")), device="cpu")
    assert modeling_llama.apply_rotary_pos_emb is before
    assert not any(module._forward_pre_hooks for module in model.model.modules())


def test_unknown_name_answers_with_near_ones():
    with pytest.raises(UsageError, match=r"no model named 'qwen3-14'.*did you mean.*qwen3-14b"):
        resolve("qwen3-14")


def test_unknown_name_like_no_other_says_where_names_are():
    with pytest.raises(UsageError, match=r"no model named 'zzzzz'.*kvmap models"):
        resolve("zzzzz")


@pytest.mark.parametrize(
    ("name", "location", "revision"),
    [
        ("qwen3-14b", "Qwen/Qwen3-14B", None),
        ("Qwen3-14B@abc", "Qwen/Qwen3-14B", "abc"),
        ("someone/model", "someone/model", None),
        ("someone/model@v1", "someone/model", "v1"),
    ],
)
def test_names_resolve_to_hub_ids(name, location, revision):
    checkpoint = resolve(name)
    assert (checkpoint.location, checkpoint.revision) == (location, revision)


def test_local_folder_resolves_to_itself(checkpoint):
    found = resolve(str(checkpoint("llama_default")))
    assert found.local
    assert found.location == str(checkpoint("llama_default").resolve())


def test_model_that_cannot_be_had_offline_is_one_sentence():
    with pytest.raises(UsageError, match=r"cannot load the model 'nobody/nothing'") as caught:
        load("nobody/nothing", device="cpu")
    assert "\n" not in str(caught.value)


def test_shapes_of_known_names_wait_for_no_network(monkeypatch):
    """Of a revision, or of a name that is not known, only the hub can tell."""
    asked = []

    def absent(*place, **how):
        asked.append(how["local_files_only"])
        raise OSError

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", absent)
    assert load_config(resolve("qwen3-8b")).num_hidden_layers == 36
    assert load_config(resolve("qwen3-8b@main")).num_hidden_layers == 36
    with pytest.raises(UsageError, match="nobody/nothing"):
        load_config(resolve("nobody/nothing"))
    assert asked == [True, False, False]


def test_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"cannot load the model"):
        load(str(tmp_path), device="cpu")


@pytest.mark.parametrize("damage", ["absent", "truncated"])
def test_damaged_weights_are_refused(checkpoint, tmp_path, damage):
    folder = tmp_path / "damaged"
    shutil.copytree(checkpoint("llama_default"), folder)
    weights = folder / "model.safetensors"
    if damage == "absent":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(UsageError, match=r"cannot load the model .*damaged"):
        load(str(folder), device="cpu")


def test_weights_that_lack_a_tensor_are_refused(checkpoint, tmp_path):
    """transformers would fill it with random numbers and go on."""
    folder = tmp_path / "gap"
    shutil.copytree(checkpoint("llama_default"), folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.v_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UsageError, match=r"gap.*lack 1 weights, model\.layers\.1\.self_attn\.v_proj"
    ):
        load(str(folder), device="cpu")


def test_folder_without_a_tokenizer_is_refused(checkpoint, tmp_path):
    folder = tmp_path / "mute"
    shutil.copytree(checkpoint("llama_default"), folder, ignore=shutil.ignore_patterns("token*"))
    with pytest.raises(UsageError, match=r"cannot load the tokenizer"):
        load(str(folder), device="cpu")


def test_unknown_dtype_is_refused(checkpoint):
    with pytest.raises(UsageError, match=r"no dtype 'float8'; expected auto, bfloat16"):
        load(str(checkpoint("llama_default")), device="cpu", dtype="float8")


def test_auto_dtype_does_not_depend_on_how_a_device_is_spelt():
    for device in ("cpu", "cpu:0", "spread"):
        assert pick_dtype("auto", device) == torch.float32
    assert pick_dtype("auto", "cuda:1") == torch.bfloat16


def test_auto_dtype_on_a_cpu_is_float32(checkpoint):
    assert load(str(checkpoint("llama_default")), device="cpu").dtype == torch.float32


def test_signature_tells_models_apart_and_nothing_else(loaded, checkpoint, tmp_path):
    """Equal files anywhere are the same model; other weights, tokenizer or template are not."""
    one = loaded("llama_default").signature
    copy = tmp_path / "elsewhere"
    shutil.copytree(checkpoint("llama_default"), copy)
    assert load(str(copy), device="cpu").signature.digest == one.digest
    others = [
        loaded(name).signature for name in ("other_tokenizer", "other_template", "llama_yarn")
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 4
    tokenizer, template, _ = others
    assert tokenizer.tokenizer_digest != one.tokenizer_digest
    assert tokenizer.template_digest == one.template_digest
    assert template.tokenizer_digest == one.tokenizer_digest
    assert template.template_digest != one.template_digest
    assert one.geometry == tokenizer.geometry


def test_signature_changes_with_one_weight(checkpoint, loaded, native, tmp_path):
    model = native("llama_default")
    weight = model.model.layers[1].self_attn.k_proj.weight.data
    weight[0, 0] += 1e-3
    try:
        checkpoints.save(model, tmp_path / "changed")
    finally:
        weight[0, 0] -= 1e-3
    changed = load(str(tmp_path / "changed"), device="cpu").signature
    assert changed.weights_digest != loaded("llama_default").signature.weights_digest
    assert changed.config_digest == loaded("llama_default").signature.config_digest


@pytest.mark.parametrize("name", ["qwen3_large", "phi3_partial"])
def test_geometry_is_read_from_the_model(loaded, name):
    geometry, options = loaded(name).signature.geometry, checkpoints.SUPPORTED[name][1]
    assert geometry.layers == options["num_hidden_layers"]
    assert geometry.kv_heads == options["num_key_value_heads"]
    assert geometry.query_heads == options["num_attention_heads"]
    assert geometry.head_size == options["head_dim"]
    assert geometry.vocabulary == checkpoints.VOCABULARY
    cache, _ = prefill(loaded(name), token_ids(1, 3))
    assert cache.keys[0].shape == (1, geometry.kv_heads, 3, geometry.head_size)
