"""The model card: measure the demo models, and write down what they are and can do.

`card.json` holds every figure for machines; `README.md` is made from it for
people; `curves.jsonl` keeps the training logs. Nothing in them is typed by hand
but the sentences of `card_text`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvmap.demo import MODELS, checkpoint_path, words, world
from kvmap.demo.card_text import render
from kvmap.demo.recipe import SCHEDULES, SHAPES
from kvmap.demo.score import perplexity, talk, tally, wilson
from kvmap.demo.story import OPENING, prose_sentence

SEEDS = (0, 1, 2)
DOCUMENTS = {64: 20, 128: 20, 256: 20, 512: 40, 1024: 16, 2048: 16, 4096: 6}  # per seed
QUESTIONS = 10
HERE = Path(__file__).parent


def measure(models: Path | None = None) -> dict[str, Any]:
    """Measure all three models; `models` is a folder of checkpoints, default the packaged ones."""
    card: dict[str, Any] = {"models": {}, "accuracy": [], "guess": guess_rates()}
    for name in MODELS:
        folder = models / name if models else checkpoint_path(name)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        card["accuracy"] += list(accuracies(name, model))
        card["models"][name] = describe(name, folder, model) | spoken(model)
    return card


def describe(name: str, folder: Path, model: PreTrainedModel) -> dict[str, Any]:
    """Say what a checkpoint is: shape, size, digest."""
    weights = folder / "model.safetensors"
    return {
        "sha256": sha256(weights.read_bytes()).hexdigest(),
        "tokenizer_sha256": sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        "bytes": weights.stat().st_size,
        "parameters": sum(p.numel() for p in model.parameters()),
        **vars(SHAPES[name]),
    }


def accuracies(name: str, model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Score a model by kind and length, by seed, and without context."""
    for length, count in DOCUMENTS.items():
        by_seed = {
            str(seed): tally(model, world.documents("evaluation", count, length, seed, QUESTIONS))
            for seed in SEEDS
        }
        for seed, counts in by_seed.items():
            yield _rate(name, length, "all", seed, counts["all"])
        for kind in ("all", *world.KINDS):
            pooled = [
                sum(part)
                for part in zip(*(counts[kind] for counts in by_seed.values()), strict=True)
            ]
            yield _rate(name, length, kind, "pooled", pooled)
    blind = tally(model, world.documents("evaluation", 60, 512, 0, QUESTIONS), context=False)
    for kind, count in blind.items():
        yield _rate(name, 0, kind, "0", count)


def spoken(model: PreTrainedModel) -> dict[str, Any]:
    """Measure perplexity per word of documents and of bare prose, and accuracy in conversations."""
    documents = [d.text for d in world.documents("evaluation", 30, 512, seed=7, questions=1)]
    rng = Random(world.seed_of("evaluation", "prose"))
    prose = [" ".join([OPENING, *(prose_sentence(rng) for _ in range(20))]) for _ in range(30)]
    moves = talk(model, world.conversations("evaluation", 40, 512))
    return {
        "perplexity_documents": round(perplexity(model, documents), 3),
        "perplexity_prose": round(perplexity(model, prose), 3),
        "conversation": {move: _bounded(count) for move, count in moves.items()},
    }


def guess_rates() -> dict[str, float]:
    """Rate guesses at 512 words: among a class, and among what the story mentions of it."""
    by_class, by_story = [], []
    for document in world.documents("evaluation", 60, 512, 0, QUESTIONS):
        told = set(document.text.split())
        for question in document.questions:
            group = next(g for g in words.CLASSES.values() if question.answer in g)
            by_class.append(1 / len(group))
            by_story.append(1 / sum(word in told for word in group))
    return {
        "among_the_class": round(sum(by_class) / len(by_class), 4),
        "among_words_of_the_class_in_the_story": round(sum(by_story) / len(by_story), 4),
    }


def write_card(card: dict[str, Any], runs: Path) -> None:
    """Write the card's three files beside the checkpoints; `runs` holds the training logs."""
    curves = []
    for name in MODELS:
        rows = [json.loads(line) for line in (runs / name / "log.jsonl").read_text().splitlines()]
        card["models"][name]["training"] = {
            key: rows[-1][key] for key in ("step", "tokens", "seconds", "loss")
        }
        card["models"][name]["schedule"] = vars(SCHEDULES[name])
        curves += [{"model": name} | row for row in rows[:: max(1, len(rows) // 150)]]
    text = "".join(json.dumps(row) + "\n" for row in curves)
    (HERE / "curves.jsonl").write_text(text)
    (HERE / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    (HERE / "README.md").write_text(render(card))


def _rate(model: str, length: int, kind: str, seed: str, count: list[int]) -> dict[str, Any]:
    return {"model": model, "tokens": length, "kind": kind, "seed": seed, **_bounded(count)}


def _bounded(count: list[int]) -> dict[str, Any]:
    low, high = wilson(*count)
    return {
        "hits": count[0],
        "count": count[1],
        "rate": round(count[0] / count[1], 4),
        "low": round(low, 4),
        "high": round(high, 4),
    }
