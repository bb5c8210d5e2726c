"""Conversations that pass back and forth, and predictions before any task."""

from dataclasses import replace

import measured
import planted
import pytest
import torch

from kvmap.evaluate import alternate, predict, runner, summary
from kvmap.evaluate.arms import make_pair
from kvmap.evaluate.items import Item, Probe, Task
from kvmap.mapping import Affine, CacheMap, LayerMap, MapOptions


@pytest.fixture(scope="module")
def pair():
    """The twin with the right map each way: turns and mixes are orthogonal, so transposed."""
    cmap, source, target = measured.twin()
    found = planted.twin("llama", 11)
    layers = tuple(
        LayerMap((s,), *(Affine(w[None].clone(), torch.zeros(1, len(w))) for w in (key, value)))
        for s, key, value in zip(found.source_layers, found.keys, found.values, strict=True)
    )
    back = CacheMap(target.signature, source.signature, layers, MapOptions())
    made = make_pair(cmap, source, target, measured.contexts(1, 24)[0])
    return replace(made, back=back)


@pytest.fixture(scope="module")
def task():
    items = [
        Item(
            context,
            tuple(
                Probe(prompt, prompt[:1], references=("x",), closing=(5,), labels={"turn": turn})
                for turn, prompt in enumerate(measured.contexts(4, 3, seed=50 + number), 1)
            ),
        )
        for number, context in enumerate(measured.contexts(3, 24))
    ]
    return Task("talk", tuple(items), 0.0, max_new_tokens=3, history="own")


def test_right_maps_each_way_change_nothing(pair, task):
    for item in task.items:
        found = alternate.alternate(pair, item, task)
        assert set(found) == set(alternate.ARMS)
        for mapped, native in zip(*found.values(), strict=True):
            assert mapped.text == native.text
            assert torch.allclose(mapped.logits, native.logits, atol=1e-3)


def test_a_wrong_map_back_shows_from_the_third_turn(pair, task):
    """The source speaks second over what was mapped back; the first turn cannot know it."""
    wrong = replace(pair, back=pair.back.each(lambda _, part: part.each(torch.zeros_like)))
    found = alternate.alternate(wrong, task.items[0], replace(task, history="gold"))
    far = [
        (mapped.logits - native.logits).abs().max().item()
        for mapped, native in zip(*found.values(), strict=True)
    ]
    assert far[0] < 1e-3
    assert far[1] > 1e-2


def test_alternation_is_reported_beside_the_other_arms(pair, task):
    scores = runner.run_task(pair, task)
    assert scores.arms[-2:] == alternate.ARMS
    found = summary.summarise_all([scores])
    assert found["arms"]["alternate"]["nll"] == pytest.approx(
        found["arms"]["alternate_native"]["nll"], abs=1e-4
    )
    assert found["tasks"]["talk"]["drift"]["alternate"]["mean"] == pytest.approx(0)


def test_questions_that_stand_apart_do_not_alternate(pair):
    scores = runner.run_task(pair, measured.questions(documents=1, each=1))
    assert "alternate" not in scores.arms


LINE = [predict.Seen(str(i), 0.8 + 0.05 * i, 0.5 + 0.1 * i) for i in range(4)]


def test_prediction_follows_the_maps_seen():
    found = predict.suggest(0.9, LINE)
    assert found["retention"] == pytest.approx(0.7)
    assert found["error"] == pytest.approx(0, abs=1e-9)
    assert found["maps"] == 4


def test_prediction_needs_several_different_maps():
    assert predict.suggest(0.9, LINE[:3]) == {"retention": None, "error": None, "maps": 3}
    again = [replace(LINE[0], retention=0.1 * i) for i in range(9)]
    assert predict.suggest(0.9, again)["maps"] == 1


def test_maps_seen_are_kept_and_broken_lines_left_out(tmp_path):
    path = tmp_path / "seen.jsonl"
    assert predict.recall(path) == []
    figures = {"retention": 0.9, "cosine": {"mean": 0.95}, "verdict": "recovers"}
    figures["about"] = {"map_sha256": "a"}
    predict.remember(path, figures)
    predict.remember(path, figures | {"verdict": "not enough items"})
    predict.remember(path, figures | {"retention": None})
    seen = {"map_sha256": "a", "read_in_calibration": {"a.txt": "content"}}
    predict.remember(path, figures | {"about": seen})
    with path.open("a") as file:
        file.write('{"cosine"')
    assert predict.recall(path) == [predict.Seen("a", 0.95, 0.9)]


def test_prediction_reads_a_few_texts(pair):
    probe = Probe((4,), (5, 6))
    items = tuple(Item(context, (probe,)) for context in measured.contexts(6, 24))
    found = predict.predict(pair, Task("text", items), LINE)
    assert found["documents"] == predict.DOCUMENTS
    assert found["cosine"] > 1 - 1e-5
    assert found["kl"] == pytest.approx(0, abs=1e-5)
    assert found["retention"] == pytest.approx(0.9, abs=1e-3)
