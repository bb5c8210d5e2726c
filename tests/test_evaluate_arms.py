"""Arms on planted pairs, where the right map is known."""

import copy
from dataclasses import replace

import measured
import pytest
import torch

from kvmap.evaluate import arms, controls, runner, summary
from kvmap.evaluate.items import Item, Probe, wrong_context
from kvmap.mapping import Affine, MapOptions
from kvmap.models import Checkpoint, prefill
from kvmap.models.load import wrap


@pytest.fixture(scope="module")
def twin():
    return measured.twin()


@pytest.fixture(scope="module")
def task():
    return measured.questions()


@pytest.fixture(scope="module")
def scores(twin, task):
    cmap, source, target = twin
    return runner.run_task(arms.make_pair(cmap, source, target, task.items[0].context), task)


def test_right_map_is_native_and_controls_are_not(scores):
    assert scores.column("accuracy", "native").min() == 1
    assert scores.column("accuracy", "mapped").min() == 1
    assert scores.column("kl", "mapped").max() < 1e-5
    for control in arms.CONTROLS:
        assert scores.column("accuracy", control).mean() < 0.5
        assert scores.column("kl", control).mean() > 0.1


def test_source_computes_the_same_function(scores):
    assert torch.allclose(scores.column("nll", "source"), scores.column("nll", "native"), atol=1e-4)
    figures = summary.summarise(scores)
    assert figures["gap_recovered"] is None
    assert "as good as native" in figures["undefined"]["gap_recovered"]


def test_right_map_recovers_the_whole_gap_to_a_source_that_reads_well_but_cannot_speak(twin, task):
    """The twin's source keeps its cache and has another head: there is a gap by construction."""
    cmap, source, target = twin
    model = copy.deepcopy(source.model)
    model.lm_head.weight = torch.nn.Parameter(source.model.lm_head.weight.roll(7, 0))
    mute = wrap(model, source.tokenizer, Checkpoint("mute", "planted"))
    handicapped = replace(cmap, source=mute.signature)
    pair = arms.make_pair(handicapped, mute, target, task.items[0].context)
    scores = runner.run_task(pair, task)
    for measure, tolerance in (("accuracy", 0), ("nll", 1e-4), ("top1", 0)):
        mapped, native = (scores.column(measure, arm) for arm in ("mapped", "native"))
        assert torch.allclose(mapped, native, atol=tolerance, rtol=0)
    figures = summary.summarise(scores)
    assert figures["arms"]["source"]["accuracy"] < 0.5
    assert figures["gap_recovered"] == pytest.approx(1)
    assert figures["intervals"]["gap_recovered"] == pytest.approx([1, 1])
    assert figures["verdict"] == "recovers"
    for control in ("random_map", "wrong_document", "zero", "no_context"):
        assert figures["arms"][control]["accuracy"] < 0.5


def test_map_that_ignores_its_input_is_called_content_free(twin, task):
    """The control map put in the place of the map under test."""
    cmap, source, target = twin
    pair = arms.make_pair(cmap, source, target, task.items[0].context)
    scores = runner.run_task(replace(pair, cmap=pair.zero), task)
    figures = summary.summarise(scores)
    assert figures["verdict"] == "content-free"
    assert figures["retention"] < 0.5


def test_random_map_keeps_spectrum_and_output_moments(twin, task):
    cmap, source, target = twin
    pair = arms.make_pair(cmap, source, target, task.items[0].context)
    sample = prefill(source, torch.tensor([task.items[0].context]))[0]
    wanted, found = (controls.output_moments(m, target, sample) for m in (cmap, pair.random))
    for key, (mean, spread) in wanted.items():
        assert torch.allclose(found[key][0], mean, atol=1e-4)
        assert found[key][1].item() == pytest.approx(spread.item(), rel=1e-3)
    spectrum = torch.linalg.svdvals(pair.random.layers[1].value.weight[0])
    assert spectrum.max() / spectrum.min() == pytest.approx(1, abs=1e-3)  # the twin's is orthogonal


def test_wrong_document_has_equal_length_and_other_words(task):
    for index, item in enumerate(task.items):
        other = wrong_context(task.items, index)
        assert len(other) == len(item.context)
        assert other != item.context


def test_wrong_document_is_joined_from_shorter_ones():
    probe = Probe((1,), (2,))
    items = [Item((1, 2, 3, 4, 5), (probe,)), Item((6, 7), (probe,)), Item((8, 9, 10), (probe,))]
    assert wrong_context(items, 0) == (6, 7, 8, 9, 10)
    assert wrong_context(items[:1], 0) == (3, 4, 5, 1, 2)


def test_native_parts_are_the_same_in_every_arm(twin, task):
    """Head and tail come from the right document in all arms that replace the middle."""
    cmap, source, target = twin
    cmap = replace(cmap, options=MapOptions(native_head=4, native_tail=2))
    pair = arms.make_pair(cmap, source, target, task.items[0].context)
    reading = arms.read(pair, task.items[0].context, wrong_context(task.items, 0))
    for name in ("mapped", "raw_copy", "random_map", "wrong_document", "zero"):
        made = arms.ARMS[name].make(pair, reading)
        assert made.tokens == reading.native.tokens
        for layer in range(made.layers):
            head = reading.native.keys[layer][:, :, :4]
            assert torch.allclose(made.keys[layer][:, :, :4], head, atol=1e-5)
            middle = made.values[layer][:, :, 4:-2] - reading.native.values[layer][:, :, 4:-2]
            assert (middle.abs().max() < 1e-4) == (name == "mapped")


def test_raw_copy_needs_equal_heads(twin):
    cmap = twin[0]
    narrow = replace(cmap.target, geometry=replace(cmap.target.geometry, head_size=8))
    assert arms.applies("raw_copy", cmap)
    assert not arms.applies("raw_copy", replace(cmap, target=narrow))


@pytest.mark.parametrize("form", ["factors", "network"])
def test_random_map_follows_any_form_of_a_part(form):
    """A part of two factors, or with a network beside it, is a shuffle before and a turn after."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    steps = (Affine(draw(2, 6, 8), draw(2, 8)), Affine(draw(2, 8, 4), torch.zeros(2, 4)))
    part = {
        "factors": Affine(draw(2, 6, 3), torch.zeros(2, 4), up=draw(2, 3, 4)),
        "network": Affine(draw(2, 6, 4), torch.zeros(2, 4), network=steps),
    }[form]
    found = controls.scramble(part, torch.Generator().manual_seed(6))
    other = torch.Generator().manual_seed(6)
    order = torch.stack([torch.randperm(6, generator=other) for _ in range(2)])
    signs = torch.randint(0, 2, (2, 6, 1), generator=other) * 2.0 - 1.0
    turn = torch.linalg.qr(torch.randn(2, 4, 4, generator=other, dtype=torch.float64)).Q.float()
    x = draw(5, 2, 3, 6)
    # Row i of the new weight is row order[i] of the old: entry i of x meets what order[i] met.
    undone = torch.empty_like(x)
    for group in range(2):
        undone[:, group][..., order[group]] = x[:, group] * signs[group, :, 0]
    assert torch.allclose(found(x), part(undone) @ turn, atol=1e-4)
