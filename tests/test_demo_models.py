"""The packaged models are the ones the card describes, and do what it says."""

from __future__ import annotations

import json
from hashlib import sha256
from importlib.resources import files

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvmap.demo import MODELS, checkpoint_path, world
from kvmap.demo.card_text import find, render
from kvmap.demo.score import encode, right, tally, wilson

torch.set_num_threads(1)
CARD = json.loads((files("kvmap.demo") / "card.json").read_text())
FRESH = 991  # a seed the card was not measured with


@pytest.fixture(scope="module")
def models():
    """The three models in float32."""
    load = AutoModelForCausalLM.from_pretrained
    return {m: load(checkpoint_path(m), dtype=torch.float32).eval() for m in MODELS}


def test_weights_have_the_digests_on_the_card():
    for name in MODELS:
        weights = (checkpoint_path(name) / "model.safetensors").read_bytes()
        assert sha256(weights).hexdigest() == CARD["models"][name]["sha256"]


def test_the_three_share_one_tokenizer_and_fit_in_the_wheel():
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert len({(checkpoint_path(m) / file).read_bytes() for m in MODELS}) == 1
    folder = checkpoint_path("tiny-s").parent
    assert sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) < 12e6


@pytest.mark.parametrize("name", MODELS)
def test_fresh_items_score_what_the_card_says(name, models):
    """200 items; the intervals must meet, the fresh one at 99.9 %: three are tried every time."""
    documents = list(world.documents("evaluation", 25, 512, seed=FRESH, questions=8))
    hits, count = tally(models[name], documents)["all"]
    assert count == 200
    low, high = wilson(hits, count, z=3.3)
    said = find(CARD, name, 512)
    assert max(low, said["low"]) <= min(high, said["high"]), (hits, count, said)


def test_the_card_states_a_gap_of_capability():
    """The figures the project promises."""
    s, m, l = (find(CARD, name, 512)["rate"] for name in MODELS)  # noqa: E741
    assert l >= 0.95
    assert s < m
    assert 0.55 <= m <= 0.80
    assert min(find(CARD, "tiny-l", 512, kind)["rate"] for kind in world.KINDS) >= 0.90
    assert find(CARD, "tiny-l", 2048)["rate"] >= 0.90
    assert max(find(CARD, name, 0)["rate"] for name in MODELS) <= 0.10
    assert CARD["guess"]["among_the_class"] <= 0.10


def test_the_card_for_people_is_made_from_the_card_for_machines():
    assert (files("kvmap.demo") / "README.md").read_text() == render(CARD)


def test_geometries_make_a_matched_and_a_mismatched_pair(models):
    shapes = {n: m.config for n, m in models.items()}
    assert [c.num_key_value_heads for c in shapes.values()] == [2, 4, 4]
    assert {c.head_dim for c in shapes.values()} == {32}
    for different in ("num_hidden_layers", "hidden_size"):
        assert len({getattr(c, different) for c in shapes.values()}) == 3
    assert len({c.rope_parameters["rope_theta"] for c in shapes.values()}) == 3
    assert {c.max_position_embeddings for c in shapes.values()} == {32768}
    assert {c.model_type for c in shapes.values()} == {"qwen3"}


def test_the_tokenizer_gives_a_word_a_token_and_back():
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path("tiny-l"))
    for text in world.calibration_texts(5, 128):
        ids = tokenizer(text).input_ids
        assert ids == encode(text)[0].tolist()
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
    assert tokenizer("quantum").input_ids == [tokenizer.unk_token_id]


def test_the_chat_template_reads_as_turns_of_a_lesson():
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path("tiny-l"))
    turns = [
        ("user", "here is a story . so who gets tea"),
        ("assistant", "mia"),
        ("user", "and milk"),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    said = tokenizer.apply_chat_template(messages, tokenize=False)
    assert said == "here is a story . so who gets tea mia . and milk"


def test_asking_of_a_copied_cache_equals_asking_anew(models):
    """The scorer reads a document once; its answers must be those of reading everything."""
    document = next(world.documents("evaluation", 1, 128, seed=5))
    for model in models.values():
        anew = []
        for question in document.questions:
            with torch.inference_mode():
                logits = model(encode(f"{document.text} {question.prompt}")).logits[0, -1]
            anew.append(logits.argmax().item() == encode(question.answer).item())
        assert right(model, document.text, document.questions) == anew


@pytest.mark.parametrize(
    ("hits", "count", "low", "high"), [(50, 100, 0.4038, 0.5962), (0, 10, 0.0, 0.2775)]
)
def test_wilson_gives_published_intervals(hits, count, low, high):
    assert wilson(hits, count) == pytest.approx((low, high), abs=1e-4)


def test_an_unknown_model_is_refused_by_name():
    with pytest.raises(
        KeyError, match="demo model: found 'tiny-x', expected one of tiny-s, tiny-m, tiny-l"
    ):
        checkpoint_path("tiny-x")
