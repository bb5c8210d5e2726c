"""Polish: the same map as `apply` makes, lower held-out divergence, resumed to the same end."""

import dataclasses

import pytest
import torch

from kvmap import artifacts, fit, pipeline
from kvmap.fit import continuation
from kvmap.fit.choice import select_layers
from kvmap.fit.coordinates import Coordinates
from kvmap.fit.job import splits
from kvmap.fit.low_rank import reduce_rank
from kvmap.fit.polish import PolishOptions, _Run, polish
from kvmap.handoff import map_middle
from kvmap.mapping import CacheMap

OPTIONS = PolishOptions(steps=12, batch=4, continuation=8, every=4, rate=2e-2)


@pytest.fixture(scope="module", params=["all", "matched", "low rank"])
def start(request, pair, calibration):
    """Return a pair, a map that too large a penalty has spoilt, sequences and coordinates."""
    recipe = fit.recipe("kvmap")
    heads = "all" if request.param == "low rank" else request.param
    late = (0,) if request.param == "all" else ()
    options = dataclasses.replace(recipe.options, heads=heads, lookback_layers=late)
    found = calibration("twin_llama")
    options = fit.with_assignment(options, found.source.geometry, found.target.geometry)
    recipe = dataclasses.replace(recipe, k=1, ridge=0.3, rank=None, options=options)
    data = splits(found, options.native_head)
    layers = select_layers(data, recipe).layers
    openers = tuple(lambda model=model: model for model in pair("twin_llama"))
    cmap = pipeline.fit_map(found, layers, recipe, lambda *_: None, openers).cmap
    if request.param == "low rank":
        cmap = reduce_rank(cmap, data, 24)
        assert cmap.layers[1].shared
    sequences = tuple(found.token_ids(split) for split in ("train", "held_out"))
    return pair("twin_llama"), cmap, sequences, Coordinates.of(cmap, data)


def test_the_differentiable_map_is_the_map(start):
    models, cmap, sequences, _ = start
    given = continuation.lesson(models, sequences[1], 8, cmap.options.native_head)
    own = given.native.slice(given.head, given.native.tokens)
    assert given.before.tokens == given.head > 0
    found = continuation.map_with_gradient(cmap, given.source, own, given.before)
    wanted = map_middle(cmap, models[1], given.source, before=given.before)
    for made, expected in zip(
        (*found.keys, *found.values), (*wanted.keys, *wanted.values), strict=True
    ):
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


def test_autograd_keeps_each_part_of_the_inputs_once(start):
    """Not joined, which would be a copy for the keys and one for the values of every layer."""
    models, cmap, sequences, _ = start
    given = continuation.lesson(models, sequences[1], 8, cmap.options.native_head)
    own = given.native.slice(given.head, given.native.tokens)
    live = cmap.each(lambda _, part: part.each(lambda t: t.clone().requires_grad_()))
    weights = {
        t.untyped_storage().data_ptr() for part in live.layers[1:] for t in part.tensors().values()
    }
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        continuation.map_with_gradient(live, given.source, own, given.before)
    joined = sum(
        4 * part.of(kind).weight[..., 0].numel()
        for part in live.layers[1:]
        for kind in ("key", "value")
    )
    joined *= own.positions.numel()
    assert 0 < sum(size for at, size in kept.items() if at not in weights) < joined / 2


def test_keys_and_values_that_read_the_same_have_one_factor(start):
    frames = start[3].frames
    assert frames[1, "key"].whiten is frames[1, "value"].whiten
    assert frames[1, "key"].whiten is not frames[2, "key"].whiten


def test_white_coordinates_stand_for_the_same_map(start):
    _, cmap, _, coordinates = start
    leaves = {name: leaf for name, (leaf, _) in coordinates.leaves(cmap).items()}
    back = coordinates.cmap(cmap, leaves)
    for layer, other in zip(cmap.layers, back.layers, strict=True):
        for kind in ("key", "value") if layer else ():
            for name, tensor in layer.of(kind).tensors().items():
                torch.testing.assert_close(
                    other.of(kind).tensors()[name], tensor, rtol=1e-3, atol=1e-4
                )


def test_polish_lowers_the_held_out_divergence(start, tmp_path):
    models, cmap, sequences, coordinates = start
    made = polish(cmap, models, sequences, coordinates, OPTIONS)
    # What a low rank leaves out is out of reach.
    share = 0.98 if cmap.layers[1].shared else 0.95
    assert min(made.history.values()) < share * made.history[0]
    assert made.cmap.parameters == cmap.parameters
    again = CacheMap.load(made.cmap.save(tmp_path / "polished"))
    given = continuation.lesson(models, sequences[1][:4], 8, again.options.native_head)
    with torch.no_grad():
        before, after = (float(continuation.loss(m, models[1], given)[1]) for m in (cmap, again))
    assert after < before


def test_a_map_that_polish_does_not_help_comes_back_unchanged(start):
    models, cmap, sequences, coordinates = start
    wild = dataclasses.replace(OPTIONS, rate=100.0)
    made = polish(cmap, models, sequences, coordinates, wild)
    assert torch.equal(made.cmap.layers[1].key.weight, cmap.layers[1].key.weight)


def polished_with_checkpoint(start, path):
    """Polish beside a checkpoint; return what was made and the steps that were told."""
    models, cmap, sequences, coordinates = start
    seen = []
    note = lambda step, done, total: seen.append(done)  # noqa: E731
    return polish(cmap, models, sequences, coordinates, OPTIONS, path, note), seen


def test_an_interrupted_polish_ends_as_an_uninterrupted_one(start, tmp_path):
    models, cmap, sequences, coordinates = start
    whole = polish(cmap, models, sequences, coordinates, OPTIONS)
    path = tmp_path / "polish.safetensors"

    def stop(step, done, total):
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        polish(cmap, models, sequences, coordinates, OPTIONS, path, stop)
    assert path.exists()
    resumed, seen = polished_with_checkpoint(start, path)
    assert seen[0] == 5
    assert resumed.history == whole.history
    for layer, other in zip(resumed.cmap.layers[1:], whole.cmap.layers[1:], strict=True):
        assert torch.equal(layer.key.weight, other.key.weight)
    assert not path.exists()


def test_a_damaged_checkpoint_is_not_taken_up(start, tmp_path):
    path = tmp_path / "polish.safetensors"
    path.write_bytes(b"half a file")
    _, seen = polished_with_checkpoint(start, path)
    assert seen[0] == 1
    assert not path.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"step": None},
        {"step": "x"},
        {"step": 10**6},
        {"history": {}},
        {"history": {"x": 1}},
        {"history": {"0": None}},
        {"1.leaf": None},
        {"0.best": torch.zeros(3)},
        {"0.exp_avg": torch.tensor(1)},
    ],
    ids=str,
)
def test_a_checkpoint_that_is_not_sound_changes_nothing(start, tmp_path, change):
    """So that the polish begins anew; its own state is taken up whole."""
    _, cmap, _, coordinates = start
    run = lambda: _Run(cmap, coordinates, OPTIONS, "key")  # noqa: E731
    saved, path = run(), tmp_path / "polish.safetensors"
    saved.step, saved.history = 4, {0: 2.0, 4: 1.0}
    for leaf in saved.leaves:
        leaf.data.add_(1)
        state = {name: torch.ones_like(leaf) for name in ("exp_avg", "exp_avg_sq")}
        saved.optimizer.state[leaf] = {"step": torch.tensor(4.0), **state}
    saved.save(path)
    opened, again = artifacts.open_artifact(path), run()
    again.resume(path)
    assert (again.step, again.history) == (4, saved.history)
    assert all(map(torch.equal, again.leaves, saved.leaves))
    parts = {k: v for k, v in (opened.tensors() | change).items() if torch.is_tensor(v)}
    fields = opened.metadata | {k: v for k, v in change.items() if "." not in k}
    artifacts.write(path, "polish", parts, fields)
    fresh, untouched = run(), run()
    fresh.resume(path)
    assert (fresh.step, fresh.history) == (0, {})
    assert all(map(torch.equal, fresh.leaves, untouched.leaves))


def test_a_polish_learns_behind_the_head_and_tail_that_the_target_will_run(start, monkeypatch):
    """A tail of half a short context at most, so that something is left to map."""
    models, cmap, sequences, coordinates = start
    options = dataclasses.replace(cmap.options, native_head=3, native_tail=20, tail_share=1.0)
    cmap, seen = dataclasses.replace(cmap, options=options), []
    read = continuation.Readings.lesson

    def spy(readings, *asked):
        seen.append(made := read(readings, *asked))
        return made

    monkeypatch.setattr(continuation.Readings, "lesson", spy)
    polish(cmap, models, sequences, coordinates, OPTIONS)
    contexts = [made.head + made.source.tokens + made.tail for made in seen]
    assert len(set(contexts)) > 2
    assert [made.tail for made in seen] == [min(20, context // 2) for context in contexts]
    assert all(made.head == 3 and made.logits.shape[1] == 9 for made in seen)
