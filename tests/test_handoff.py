"""The whole handoff against transformers alone: identity, planted twins, exact head and tail."""

import dataclasses

import checkpoints
import oracles
import pytest
import torch
from conftest import token_ids

from kvmap import fit
from kvmap.bench.shapes import random_map
from kvmap.errors import UsageError
from kvmap.fit import Recipe
from kvmap.fit.choice import select_layers
from kvmap.fit.job import splits
from kvmap.handoff import check_pair, finish, handoff, map_context
from kvmap.mapping import Affine, CacheMap, LayerMap, MapOptions
from kvmap.models import continue_logits, generate, prefill, to_dynamic_cache
from kvmap.pipeline import fit_map

FAMILIES = ["qwen3_small", "llama_default", "llama_llama3", "llama_yarn", "ministral3"]
TWINS = ["twin_llama", "twin_qwen3"]
PLANTED = [*TWINS, "image"]
PAPER = Recipe(1, 1e-10, MapOptions())
LIGHT = Recipe(1, "auto", MapOptions(heads="matched"))
FULL = dataclasses.replace(
    fit.recipe("kvmap"), options=dataclasses.replace(fit.recipe("kvmap").options, native_tail=4)
)


def linear(loaded_source, loaded_target, source_layers, keys, values, **options) -> CacheMap:
    """Make a map of given matrices [H_t * D_t, H_s * D_s] and no bias."""
    width = loaded_target.signature.geometry.width

    def affine(matrix):
        return Affine(matrix.T[None].contiguous(), torch.zeros(1, width))

    layers = tuple(
        LayerMap((of,), affine(key), affine(value))
        for of, key, value in zip(source_layers, keys, values, strict=True)
    )
    signatures = (loaded_source.signature, loaded_target.signature)
    return CacheMap(*signatures, layers, MapOptions(**options))


def identity(loaded, **options) -> CacheMap:
    geometry = loaded.signature.geometry
    eye = [torch.eye(geometry.width)] * geometry.layers
    return linear(loaded, loaded, range(geometry.layers), eye, eye, **options)


def perturbed(cmap: CacheMap, size: float = 0.05) -> CacheMap:
    """Add noise to every weight, relative to the largest of its layer."""
    generator = torch.Generator().manual_seed(0)

    def shake(affine):
        noise = torch.randn(affine.weight.shape, generator=generator)
        weight = affine.weight + size * affine.weight.abs().max() * noise
        return dataclasses.replace(affine, weight=weight)

    layers = tuple(
        layer and LayerMap(layer.source_layers, shake(layer.key), shake(layer.value))
        for layer in cmap.layers
    )
    return dataclasses.replace(cmap, layers=layers)


def handed_over(cmap, source, target, ids, new=None) -> torch.Tensor:
    """Return the target's logits [B, 1 + new, V] after a context it took over."""
    cache, _ = prefill(source, ids)
    done = handoff(cmap, target, cache, ids)
    assert done.outcome == "applied"
    assert done.cache.tokens == ids.shape[1]
    if new is None:
        return done.logits[:, None]
    return torch.cat((done.logits[:, None], continue_logits(target, done.cache, new)), dim=1)


def error(cmap, source, target, ids, new) -> float:
    """Return the largest distance from transformers' own logits of the whole text."""
    expected = oracles.native_logits(target.model, torch.cat((ids, new), 1))[:, ids.shape[1] - 1 :]
    return float((handed_over(cmap, source, target, ids, new) - expected).abs().max())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("native_head", "native_tail"), [(0, 1), (4, 64)])
def test_identity_reproduces_native_logits(loaded, name, native_head, native_tail):
    """fp32 to 1e-4: stripping and turning again, head, tail and concatenation included."""
    model = loaded(name)
    cmap = identity(model, native_head=native_head, native_tail=native_tail)
    assert error(cmap, model, model, token_ids(2, 60), token_ids(2, 8, seed=1)) < 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_identity_reproduces_native_greedy_text(loaded, native, name):
    model, ids = loaded(name), token_ids(1, 50)
    done = handoff(identity(model), model, prefill(model, ids)[0], ids)
    expected = oracles.native_greedy(native(name), ids, 8)
    assert done.logits.argmax(-1).tolist() == expected[:, 0].tolist()
    assert torch.equal(generate(model, done.cache, ids, 8), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_identity_holds_in_bf16(loaded, name):
    """0.05 nats a token: the cache is stripped and turned in fp32 and rounded once more."""
    model, ids = loaded(name, "bfloat16"), token_ids(2, 40)
    own = handed_over(identity(model), model, model, ids).float().log_softmax(-1)
    native = prefill(model, ids)[1].float().log_softmax(-1)
    assert (native.exp() * (native - own)).sum(-1).max() < 0.05


@pytest.mark.parametrize("name", PLANTED)
def test_planted_map_gives_native_logits(plant, pair, name):
    known, models = plant(name), pair(name)
    cmap = linear(*models, known.source_layers, known.keys, known.values)
    ids, new = token_ids(2, 60), token_ids(2, 8, seed=1)
    assert error(cmap, *models, ids, new) < 1e-4
    assert error(perturbed(cmap), *models, ids, new) > 1e-2


@pytest.mark.parametrize("name", TWINS)
def test_untransferred_cache_fails_the_same_test(pair, name):
    """The shapes are equal, so nothing else would tell."""
    source, target = pair(name)
    geometry = source.signature.geometry
    eye = [torch.eye(geometry.width)] * geometry.layers
    raw = linear(source, target, range(geometry.layers), eye, eye)
    assert error(raw, source, target, token_ids(2, 60), token_ids(2, 8, seed=1)) > 0.5


def recovered(calibration, recipe: Recipe):
    choice = select_layers(splits(calibration, recipe.options.native_head), recipe)
    return choice, fit_map(calibration, choice.layers, recipe, lambda *_: None)


RECOVERABLE = [(name, recipe) for name in PLANTED for recipe in (PAPER, FULL)]
# The unmatched pair's key heads read all source heads, so matched heads cannot recover it.
RECOVERABLE += [(name, LIGHT) for name in TWINS]


@pytest.mark.parametrize(("name", "recipe"), RECOVERABLE)
def test_planted_twin_is_recovered(plant, pair, calibration, name, recipe):
    """Collect, choose, fit, hand over, with the right answer known at each step."""
    choice, fitted = recovered(calibration(name), recipe)
    if recipe.k == 1:
        assert choice.layers == tuple((of,) for of in plant(name).source_layers)
    for kind in ("key", "value"):
        held_out = fitted.scores.held_out[kind]
        assert held_out[~held_out.isnan()].min() >= 0.9999
    ids, new = token_ids(2, 90, seed=9), token_ids(2, 8, seed=10)
    assert error(fitted.cmap, *pair(name), ids, new) < 1e-3
    assert error(perturbed(fitted.cmap), *pair(name), ids, new) > 1e-2


@pytest.mark.parametrize("name", PLANTED)
def test_recovered_weights_are_the_planted_ones(plant, calibration, name):
    _, fitted = recovered(calibration(name), PAPER)
    known = plant(name)
    for layer, key, value in zip(fitted.cmap.layers, known.keys, known.values, strict=True):
        for found, expected in ((layer.key, key), (layer.value, value)):
            torch.testing.assert_close(found.weight[0].T, expected, atol=2e-3, rtol=0)
            assert found.bias.abs().max() < 2e-3


def test_map_saved_and_read_hands_over_alike(pair, calibration, tmp_path):
    _, fitted = recovered(calibration("image"), FULL)
    again = CacheMap.load(fitted.cmap.save(tmp_path / "m"))
    ids = token_ids(1, 60)
    one = handed_over(fitted.cmap, *pair("image"), ids)
    assert torch.equal(one, handed_over(again, *pair("image"), ids))


def broken(loaded, **options) -> CacheMap:
    """Map everything to noise, so that only what is native can be right."""
    return perturbed(identity(loaded, **options), 5.0)


@pytest.mark.parametrize("head", [1, 4])
def test_native_head_is_exact(loaded, native, head):
    model, ids = loaded("qwen3_small"), token_ids(2, 40)
    done = handoff(broken(model, native_head=head), model, prefill(model, ids)[0], ids)
    keys, values = oracles.native_cache(native("qwen3_small"), ids)
    for layer in range(done.cache.layers):
        torch.testing.assert_close(done.cache.keys[layer][:, :, :head], keys[layer][:, :, :head])
        found, expected = done.cache.values[layer], values[layer]
        torch.testing.assert_close(found[:, :, :head], expected[:, :, :head])
        assert (found[:, :, head:-1] - expected[:, :, head:-1]).abs().max() > 0.5


@pytest.mark.parametrize("head", [1, 4])
def test_what_is_mapped_looks_back_into_the_native_head(loaded, head):
    """The middle is that of a map of the whole context: the source has read the head as well."""
    model, ids = loaded("qwen3_small"), token_ids(2, 40)
    options = MapOptions(lookback=3, lookback_layers=(0, 1), native_head=head)
    signatures = (model.signature, model.signature)
    cmap = random_map(signatures, Recipe(2, 0.0, options), torch.device("cpu"), torch.float32)
    own, _ = prefill(model, ids)
    whole, done = cmap.apply(own), handoff(cmap, model, own, ids).cache
    for layer in range(done.layers):
        for found, wanted in ((done.keys, whole.keys), (done.values, whole.values)):
            torch.testing.assert_close(found[layer][:, :, head:-1], wanted[layer][:, :, head:-1])


@pytest.mark.parametrize(
    ("asked", "share", "tokens", "given"),
    [(1, 0.05, 40, 1), (3, 0.05, 60, 3), (64, 0.05, 100, 5), (64, 1.0, 100, 64)],
)
def test_native_tail_runs_over_the_mapped_cache(loaded, asked, share, tokens, given):
    """Exact where the map is: its own layer 0 depends on nothing before it.

    A tail is at least one token, and at most a share of the context.
    """
    parts = {"native_tail": asked, "tail_share": share}
    assert MapOptions(**parts).tail_length(tokens) == given
    model, ids = loaded("qwen3_small"), token_ids(2, tokens)
    own, _ = prefill(model, ids)
    spoilt = handoff(broken(model, **parts), model, own, ids).cache
    wrong = (spoilt.values[0] - own.values[0]).abs().amax((0, 1, 3)) > 1e-3
    assert wrong.tolist() == [True] * (tokens - given) + [False] * given
    assert (spoilt.values[2][:, :, -1] - own.values[2][:, :, -1]).abs().max() > 0.1


def test_exact_first_layer_is_exact_everywhere(loaded, native):
    model, ids = loaded("llama_llama3"), token_ids(2, 40)
    cmap = broken(model, exact_first=True)
    cmap = dataclasses.replace(cmap, layers=(None, *cmap.layers[1:]))
    done = handoff(cmap, model, prefill(model, ids)[0], ids)
    keys, values = oracles.native_cache(native("llama_llama3"), ids)
    torch.testing.assert_close(done.cache.keys[0], keys[0])
    torch.testing.assert_close(done.cache.values[0], values[0])
    assert (done.cache.values[1] - values[1]).abs().max() > 0.5


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_context_with_nothing_to_map_is_prefilled(loaded, native, tokens):
    model, ids = loaded("qwen3_small"), token_ids(2, tokens)
    done = handoff(broken(model, native_head=4), model, prefill(model, ids)[0], ids)
    assert done.outcome == "fallback_reprefill"
    expected = oracles.native_logits(native("qwen3_small"), ids)[:, -1]
    torch.testing.assert_close(done.logits, expected, atol=1e-4, rtol=0)
    assert done.cache.tokens == tokens


def test_source_cache_need_not_cover_the_tail(loaded):
    model, ids = loaded("qwen3_small"), token_ids(1, 40)
    short, _ = prefill(model, ids[:, :39])
    whole, _ = prefill(model, ids)
    cmap = identity(model)
    one, other = (handoff(cmap, model, cache, ids).logits for cache in (short, whole))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_shorter_source_cache_is_refused(loaded):
    model, ids = loaded("qwen3_small"), token_ids(1, 40)
    short, _ = prefill(model, ids[:, :30])
    with pytest.raises(UsageError, match=r"source's cache has 30 tokens, expected at least 39"):
        handoff(identity(model), model, short, ids)


def test_source_cache_of_other_tokens_is_refused(loaded):
    model = loaded("qwen3_small")
    cache, _ = prefill(model, token_ids(1, 40, seed=2))
    with pytest.raises(UsageError, match="made from other tokens"):
        handoff(identity(model), model, cache, token_ids(1, 40))


@pytest.mark.parametrize("at", [7, 39], ids=["middle", "tail"])
@pytest.mark.parametrize("found", [-1, checkpoints.VOCABULARY])
@pytest.mark.parametrize("anchor", [False, True])
def test_tokens_outside_the_vocabulary_are_refused_in_either_half(loaded, at, found, anchor):
    """A map that reads nothing of the target would never look at those of the middle."""
    model, ids = loaded("qwen3_small"), token_ids(2, 40)
    cmap = identity(model, exact_first=anchor)
    own, _ = prefill(model, ids)
    mapped = map_context(cmap, model, own, ids)
    ids[1, at] = found
    unnamed = [dataclasses.replace(cache, token_ids=None) for cache in (own, mapped)]
    said = rf"found token id {found}, expected 0 to {checkpoints.VOCABULARY - 1}; take tokens of"
    with pytest.raises(UsageError, match=said):
        map_context(cmap, model, unnamed[0], ids)
    with pytest.raises(UsageError, match=said):
        finish(model, unnamed[1], ids, 0)
    with pytest.raises(UsageError, match=r"found token ids of torch.float32, expected int64"):
        map_context(cmap, model, unnamed[0], ids.float())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"mask": torch.ones(1, 7, dtype=torch.bool)},
            r"mask has shape \(1, 7\), expected \(1, 4",
        ),
        ({"mask": torch.ones(40, dtype=torch.bool)}, r"mask has shape \(40,\), expected \(1, 40\)"),
        (
            {"positions": torch.arange(40)},
            r"the positions are \(40,\) .*, expected \[batch",
        ),
        ({"token_ids": torch.arange(40)}, r"token_ids has shape \(40,\), expected \(1, 40\)"),
        ({"values": ()}, "found 0 layers of values, expected 3 of "),
        (
            {"keys": (torch.ones(1, 2, 40, 16).int(),) * 3},
            "0's keys .* torch.int32, expected .*",
        ),
    ],
    ids=["mask", "flat mask", "positions", "token_ids", "values", "integers"],
)
def test_caches_of_another_shape_are_refused_in_either_half(loaded, changes, said):
    model, ids = loaded("qwen3_small"), token_ids(1, 40)
    cmap, own = identity(model), prefill(model, ids)[0]
    wrong = dataclasses.replace(own, **changes)
    with pytest.raises(UsageError, match=f"the source's cache: .*{said}"):
        map_context(cmap, model, wrong, ids)
    with pytest.raises(UsageError, match=f"the mapped cache: .*{said}"):
        finish(model, wrong, ids, 0)
    with pytest.raises(UsageError, match=f"the cache to map: .*{said}"):
        cmap.map(wrong)


def test_token_ids_of_int32_are_those_of_int64(loaded):
    model, ids = loaded("qwen3_small"), token_ids(1, 40)
    own, _ = prefill(model, ids)
    cmap = identity(model, native_head=4)
    wanted = handoff(cmap, model, own, ids)
    for cache in (own, dataclasses.replace(own, token_ids=own.token_ids.int())):
        for given in (ids, ids.int()):
            found = handoff(cmap, model, cache, given)
            assert torch.equal(found.logits, wanted.logits)
            assert torch.equal(found.cache.token_ids, ids)


def test_tokens_of_no_batch_are_refused(loaded):
    model, ids = loaded("qwen3_small"), token_ids(1, 40)
    own, _ = prefill(model, ids)
    with pytest.raises(UsageError, match=r"found token ids of shape \[40\], expected \[sequences"):
        handoff(identity(model), model, own, ids[0])


def test_an_empty_context_is_refused(loaded):
    model, ids = loaded("qwen3_small"), token_ids(2, 9)
    with pytest.raises(UsageError, match=r"found tokens \[2, 0\], expected a context of one"):
        handoff(broken(model), model, prefill(model, ids)[0], ids[:, :0])


def test_a_context_beyond_what_the_target_reads_is_refused(loaded):
    model, ids = loaded("qwen3_small"), token_ids(1, 40)
    own, _ = prefill(model, ids)
    mapped = map_context(identity(model), model, own, ids)
    most = model.signature.geometry.max_positions
    late = lambda by: dataclasses.replace(mapped, positions=mapped.positions + by)  # noqa: E731
    assert finish(model, late(most - 40), ids, 0).outcome == "applied"
    said = rf"the context needs {most + 1} positions, but .* reads at most {most}; hand over less"
    with pytest.raises(UsageError, match=said):
        finish(model, late(most - 39), ids, 0)


@pytest.mark.parametrize("head", [0, 40])
def test_a_context_beyond_what_the_target_reads_is_refused_before_any_work(
    loaded, head, monkeypatch
):
    """One that begins too late, and one too long for a target that runs all of it."""
    model, ids = loaded("qwen3_small"), token_ids(1, 40)
    own, _ = prefill(model, ids)
    geometry = dataclasses.replace(model.signature.geometry, max_positions=39 if head else 340)
    signature = dataclasses.replace(model.signature, geometry=geometry)
    model = dataclasses.replace(model, signature=signature)
    cmap = identity(model, native_head=head)
    if not head:
        own = dataclasses.replace(own, positions=own.positions + 300)
        assert handoff(cmap, model, own, ids).outcome == "applied"
        own = dataclasses.replace(own, positions=own.positions + 1)
    for work in ("map_middle", "_empty", "prefill"):
        monkeypatch.setattr(f"kvmap.handoff.{work}", None)
    for call in (handoff, map_context):
        with pytest.raises(UsageError, match=r"the context needs (40|341) positions, but .*; hand"):
            call(cmap, model, own, ids)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda at: at.flip(1), "token 1 at position 3[78], expected (39|40)"),
        (lambda at: 2 * at, "token 1 at position 2, expected 1"),
        (lambda at: at - 5, "token 0 at position -5, expected 0"),
        (lambda at: at.index_fill(1, torch.tensor([20]), 3), "token 20 at position 3, expected 20"),
    ],
    ids=["reversed", "gaps", "negative", "twice"],
)
def test_positions_out_of_order_are_refused_in_either_half(loaded, change, said):
    model, ids = loaded("qwen3_small"), token_ids(2, 40)
    cmap = identity(model)
    own, _ = prefill(model, ids)
    mapped = map_context(cmap, model, own, ids)
    wrong = [
        dataclasses.replace(cache, positions=change(cache.positions)) for cache in (own, mapped)
    ]
    with pytest.raises(UsageError, match=rf"source's cache has {said}: one by one, from 0 or la"):
        map_context(cmap, model, wrong[0], ids)
    with pytest.raises(UsageError, match=rf"mapped cache has {said}: one by one, from 0 or later"):
        finish(model, wrong[1], ids, 0)


@pytest.mark.parametrize("side", ["source", "target"])
def test_models_other_than_the_maps_are_refused(loaded, side):
    cmap = identity(loaded("qwen3_small"))
    models = {"source": loaded("qwen3_small"), "target": loaded("qwen3_small")}
    check_pair(cmap, **models)
    models[side] = loaded("llama_default")
    with pytest.raises(
        UsageError, match=rf"the map's {side} is .*qwen3_small.*found .*llama_default"
    ):
        check_pair(cmap, **models)
    own, _ = prefill(loaded("qwen3_small"), token_ids(1, 20))
    if side == "target":
        with pytest.raises(UsageError, match=r"map's target is .*qwen3_small.*found .*llama_defa"):
            cmap.map(own, target=models[side])


def test_a_cache_of_another_model_does_not_go_on(loaded):
    """One that has fewer layers, and one that has more."""
    small, large = loaded("qwen3_small"), loaded("qwen3_large")
    for reader, writer, said in ((small, large, "4 layers, exp.* 3"), (large, small, "3 .* 4")):
        cache, _ = prefill(writer, token_ids(1, 20))
        with pytest.raises(UsageError, match=rf"found a cache of {said} of .*; map it to this m"):
            continue_logits(reader, cache, token_ids(1, 4))


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_header_that_turns_keys_otherwise_than_the_model_is_refused(loaded, side):
    model = loaded("qwen3_small")
    geometry = model.signature.geometry
    wrong = dataclasses.replace(geometry, rope=(None,) * geometry.layers)
    signature = dataclasses.replace(model.signature, geometry=wrong)
    cmap = dataclasses.replace(identity(model), **{side: signature})
    with pytest.raises(
        UsageError, match=rf"the map's {side} is .*, found it with another cache sh"
    ):
        check_pair(cmap, model, model)


def padded(loaded):
    """Return ids [2, 32], the second row padded on the left by 9, their mask and the row alone."""
    ids, mask = token_ids(2, 32), torch.ones(2, 32, dtype=torch.bool)
    alone = ids[1:, 9:].clone()
    ids[1, :9], mask[1, :9] = 0, False
    return ids, mask, alone


@pytest.mark.parametrize("name", ["qwen3_small", "llama_yarn"])
def test_padded_batch_is_handed_over_as_if_alone(loaded, native, name):
    model = loaded(name)
    ids, mask, alone = padded(model)
    cache, _ = prefill(model, ids, mask=mask)
    done = handoff(identity(model), model, cache, ids)
    new = token_ids(2, 6, seed=3)
    found = continue_logits(model, done.cache, new)
    expected = oracles.native_logits(native(name), torch.cat((alone, new[1:]), 1))[:, 23:]
    torch.testing.assert_close(found[1:], expected, atol=1e-4, rtol=0)
    expected = oracles.native_logits(native(name), ids[:1])[:, -1]
    torch.testing.assert_close(done.logits[:1], expected, atol=1e-4, rtol=0)


def test_padded_batch_has_no_head_to_prefill(loaded):
    """The first tokens would be pads: refused rather than read as text."""
    model = loaded("qwen3_small")
    ids, mask, _ = padded(model)
    cache, _ = prefill(model, ids, mask=mask)
    with pytest.raises(UsageError, match=r"padded.*--native-head 0"):
        handoff(identity(model, native_head=4), model, cache, ids)


def test_context_that_begins_elsewhere_has_no_head_to_prefill(loaded):
    model, ids = loaded("qwen3_small"), token_ids(1, 40)
    late = prefill(model, ids)[0].slice(10, 40)
    with pytest.raises(UsageError, match=r"begins at position 10.*--native-head 0"):
        handoff(identity(model, native_head=4), model, late, ids[:, 10:])


def test_seconds_are_told_by_part(pair, calibration):
    _, fitted = recovered(calibration("twin_llama"), FULL)
    source, target = pair("twin_llama")
    ids = token_ids(1, 60)
    done = handoff(fitted.cmap, target, prefill(source, ids)[0], ids)
    assert set(done.seconds) == {"head", "first_layer", "map", "build", "tail"}
    assert all(value >= 0 for value in done.seconds.values())


def test_library_asks_for_the_tokens_of_the_first_layer(loaded):
    model, ids = loaded("qwen3_small"), token_ids(2, 20)
    cmap = dataclasses.replace(identity(model, exact_first=True), layers=(None,) * 3)
    filled = to_dynamic_cache(prefill(model, ids)[0])
    with pytest.raises(UsageError, match=r"own first layer; pass the target"):
        cmap.map(filled)
    with pytest.raises(UsageError, match=r"made of the tokens; pass token_ids"):
        cmap.map(filled, target=model)
    cmap = dataclasses.replace(cmap, layers=(None, *identity(model).layers[1:]))
    mapped = cmap.map(filled, target=model, token_ids=ids)
    for one, other in zip(mapped.layers, filled.layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, atol=1e-4, rtol=0)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": token_ids(1, 20)[0]}, r"token_ids has shape \(20,\), expected \(1, 20\)"),
        ({"token_ids": token_ids(1, 19)}, r"token_ids has shape \(1, 19\), expected \(1, 20\)"),
        ({"positions": torch.arange(20)}, r"the positions are \(20,\) torch.int64, expected \[b"),
        (
            {"positions": torch.arange(21)[None], "token_ids": None},
            r"layer 0's keys have .* expected \(1, 2, 21, 16\)",
        ),
    ],
    ids=["flat ids", "short ids", "flat positions", "long positions"],
)
def test_library_maps_no_cache_of_other_tokens(loaded, exact, changes, said):
    model, ids = loaded("qwen3_small"), token_ids(1, 20)
    cmap = identity(model, exact_first=exact)
    given = {"token_ids": ids, "target": model} | changes
    with pytest.raises(UsageError, match=f"the cache to map: {said}"):
        cmap.map(to_dynamic_cache(prefill(model, ids)[0]), **given)


def test_library_maps_no_empty_cache(loaded):
    from transformers import DynamicCache

    model = loaded("qwen3_small")
    none = prefill(model, token_ids(1, 4))[0].slice(0, 0)
    for empty in (
        DynamicCache(),
        DynamicCache(config=model.model.config),
        to_dynamic_cache(none),
        none,
    ):
        with pytest.raises(UsageError, match="the cache to map has no tokens, expected one at lea"):
            identity(model, exact_first=True).map(empty, target=model)


@pytest.mark.parametrize("given", [True, False], ids=["target", "no-target"])
def test_library_maps_a_transformers_cache_for_generate(plant, pair, given):
    """As in the README: a DynamicCache in, one out, straight into `model.generate`."""
    from transformers import DynamicCache

    known, (source, target) = plant("twin_qwen3"), pair("twin_qwen3")
    cmap = linear(source, target, known.source_layers, known.keys, known.values)
    ids = token_ids(1, 40)
    filled = DynamicCache(config=source.model.config)
    with torch.no_grad():
        source.model(ids[:, :-1], **{oracles.cache_keyword(source.model): filled})
        mapped = cmap.map(filled, target=target if given else None)
        produced = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            do_sample=False,
            **{oracles.cache_keyword(target.model): mapped},
        )
    assert torch.equal(produced[:, 40:], oracles.native_greedy(target.model, ids, 8))
