"""A session that maps as it goes against the handoff in one go."""

import dataclasses

import pytest
import torch
from conftest import token_ids

from kvmap.bench.shapes import random_map
from kvmap.errors import UsageError
from kvmap.fit import Recipe
from kvmap.handoff import handoff
from kvmap.mapping import MapOptions
from kvmap.models import continue_logits, prefill
from kvmap.streaming import StreamingMap

PLAIN = MapOptions()
EXACT = MapOptions(
    joint=True,
    anchor=True,
    exact_first=True,
    lookback=3,
    lookback_layers=(0, 2),
    native_head=4,
    native_tail=3,
)
OPTIONS = [PLAIN, MapOptions(heads="matched", lookback=2, native_head=1), EXACT]


@pytest.fixture(scope="module")
def session(loaded):
    """Return source, target and a session over a random map of the given options."""

    def make(options, **rest):
        source, target = loaded("qwen3_small"), loaded("qwen3_large")
        signatures = (source.signature, target.signature)
        torch.manual_seed(0)
        cmap = random_map(signatures, Recipe(2, 0.0, options), torch.device("cpu"), torch.float32)
        return source, target, StreamingMap(cmap, target, **rest)

    return make


def same(one, other):
    for mine, theirs in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=["paper", "matched", "kvmap"])
@pytest.mark.parametrize("steps", [(80,), (3, 1, 40, 36), (1,) * 8 + (72,)], ids=str)
def test_streaming_is_the_handoff_in_one_go(session, options, steps):
    source, target, shadow = session(options, capacity=16)
    ids = token_ids(2, 80)
    past = None
    for step in steps:
        seen = past.tokens if past else 0
        past, _ = prefill(source, ids[:, seen : seen + step], past=past)
        shadow.follow(past)
    whole = handoff(shadow.cmap, target, past, ids)
    done = shadow.handoff()
    same(done.cache, whole.cache)
    torch.testing.assert_close(done.logits, whole.logits, rtol=1e-4, atol=1e-4)
    assert done.outcome == "applied"
    assert torch.equal(done.cache.positions, whole.cache.positions)


def test_tokens_outside_the_vocabulary_are_refused_as_they_come(session):
    source, _, shadow = session(PLAIN)
    cache, _ = prefill(source, token_ids(1, 10))
    cache.token_ids[0, 3] = -7
    with pytest.raises(UsageError, match=r"qwen3_large: found token id -7, expected 0 to 259"):
        shadow.append(cache)


def test_cropped_session_goes_on_as_if_the_rest_had_never_been(session):
    source, target, shadow = session(EXACT)
    first, second = token_ids(1, 60), token_ids(1, 60, seed=5)
    second[:, :30] = first[:, :30]
    shadow.follow(prefill(source, first)[0])
    shadow.crop(30)
    cache, _ = prefill(source, second)
    shadow.follow(cache)
    same(shadow.handoff().cache, handoff(shadow.cmap, target, cache, second).cache)


def test_forks_do_not_touch_each_other(session):
    source, target, shadow = session(PLAIN)
    ids = [token_ids(1, 40, seed=seed) for seed in (1, 2)]
    ids[1][:, :20] = ids[0][:, :20]
    caches = [prefill(source, one)[0] for one in ids]
    shadow.follow(caches[0].slice(0, 20))
    branches = [shadow, shadow.fork()]
    for branch, cache in zip(branches, caches, strict=True):
        branch.follow(cache)
    for branch, cache, one in zip(branches, caches, ids, strict=True):
        same(branch.handoff().cache, handoff(shadow.cmap, target, cache, one).cache)


def test_target_goes_on_after_the_handoff(session):
    """The handed over cache continues as the one made in one go does."""
    source, target, shadow = session(EXACT)
    ids, more = token_ids(1, 50), token_ids(1, 5, seed=9)
    cache, _ = prefill(source, ids)
    shadow.follow(cache)
    wanted = continue_logits(target, handoff(shadow.cmap, target, cache, ids).cache, more)
    found = continue_logits(target, shadow.handoff().cache, more)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_gaps_missing_text_and_padding_are_refused(session):
    source, _, shadow = session(PLAIN)
    cache, _ = prefill(source, token_ids(1, 20))
    with pytest.raises(UsageError, match="begins at position 5, expected 0"):
        shadow.append(cache.slice(5, 10))
    with pytest.raises(UsageError, match="nothing has been read yet"):
        shadow.handoff()
    with pytest.raises(UsageError, match="cannot crop 0 tokens to 3"):
        shadow.crop(3)
    masked = prefill(source, token_ids(1, 20), mask=torch.ones(1, 20, dtype=torch.bool))[0]
    with pytest.raises(UsageError, match="without padding"):
        shadow.append(masked)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.only((0, 1)), "found 2 layers of keys, expected 3 of "),
        (lambda c: dataclasses.replace(c, positions=c.positions[0]), r"the positions are \(20,\)"),
        (
            lambda c: dataclasses.replace(c, token_ids=c.token_ids[:, 1:]),
            r"token_ids has shape \(1, 19\), expected \(1, 20\)",
        ),
        (
            lambda c: dataclasses.replace(c, keys=c.slice(1, 20).keys),
            r"layer 0's keys have shape \(1, 2, 19, 16\) .*, expected \(1, 2, 20, 16\)",
        ),
        (lambda c: c.first(0), "expected .* of one sequence at least"),
    ],
    ids=["layers", "positions", "token_ids", "keys", "batch"],
)
def test_chunks_of_another_shape_are_refused_before_they_are_kept(session, change, said):
    source, _, shadow = session(EXACT)
    chunk = change(prefill(source, token_ids(1, 20))[0])
    for take in (shadow.append, shadow.follow):
        with pytest.raises(UsageError, match=said):
            take(chunk)
    assert (shadow.tokens, shadow.room) == (0, None)


def test_a_session_keeps_its_batch(session):
    source, _, shadow = session(PLAIN)
    shadow.append(prefill(source, token_ids(1, 10))[0])
    with pytest.raises(UsageError, match="the chunk is of 2 sequences, expected 1 as of those bef"):
        shadow.follow(prefill(source, token_ids(2, 20))[0])
    assert shadow.cache.positions.tolist() == [list(range(10))]


def test_a_session_that_holds_nothing_hands_nothing_over(session):
    """Whether nothing came, nothing was in what came, or all of it was taken back."""
    source, target, shadow = session(PLAIN)
    ids = token_ids(1, 20)
    cache, _ = prefill(source, ids)
    for step in (lambda: shadow.append(cache.slice(0, 0)), lambda: shadow.append(cache)):
        step()
        shadow.crop(0)
        with pytest.raises(UsageError, match="nothing has been read yet"):
            shadow.handoff()
    shadow.append(cache)
    same(shadow.handoff().cache, handoff(shadow.cmap, target, cache, ids).cache)


def test_a_context_beyond_what_the_target_reads_is_refused(session):
    source, target, shadow = session(PLAIN)
    geometry = dataclasses.replace(target.signature.geometry, max_positions=20)
    signature = dataclasses.replace(target.signature, geometry=geometry)
    shadow.target = dataclasses.replace(target, signature=signature)
    cache, _ = prefill(source, token_ids(1, 21))
    shadow.append(cache.slice(0, 20))
    with pytest.raises(
        UsageError, match=r"the context needs 21 positions, but .* reads at most 20; hand"
    ):
        shadow.follow(cache)
    assert shadow.handoff().cache.tokens == 20


def test_another_target_is_refused(session, loaded):
    _, _, shadow = session(PLAIN)
    with pytest.raises(UsageError, match="the map's target is"):
        StreamingMap(shadow.cmap, loaded("qwen3_small"))
