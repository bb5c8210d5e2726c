"""Score a demo model: how many answers it gets right, and how sure of that we are.

A document is read once; its questions are then asked of copies of the cache, so
each is asked as if alone. This module knows nothing of maps: it is the oracle of
the model card.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import deepcopy
from inspect import signature
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvmap.demo.questions import Question
from kvmap.demo.tokens import word_ids
from kvmap.demo.world import Document

IDS = word_ids()


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Bound a rate by its Wilson score interval, at 95 % by default."""
    if count == 0:
        return 0.0, 1.0
    rate = hits / count
    centre = rate + z * z / (2 * count)
    spread = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def encode(text: str) -> torch.Tensor:
    """Turn words into ids, (1, T)."""
    return torch.tensor([[IDS[word] for word in text.split()]])


@torch.inference_mode()
def right(model: PreTrainedModel, text: str, questions: Iterable[Question]) -> list[bool]:
    """Say for each question asked after `text` whether the likeliest next word is its answer."""
    argument = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    read = DynamicCache(config=model.config)
    model(encode(text), use_cache=True, **{argument: read})
    found = []
    for question in questions:
        logits = model(encode(question.prompt), **{argument: deepcopy(read)}).logits[0, -1]
        found.append(logits.argmax().item() == IDS[question.answer])
    return found


def tally(
    model: PreTrainedModel, documents: Iterable[Document], context: bool = True
) -> dict[str, list[int]]:
    """Count hits and questions by kind and over `all`; without context, read the opening only."""
    counts: dict[str, list[int]] = {}
    for document in documents:
        text = document.text if context else " ".join(document.text.split()[:5])
        for question, hit in zip(
            document.questions, right(model, text, document.questions), strict=True
        ):
            for key in ("all", question.kind):
                count = counts.setdefault(key, [0, 0])
                count[0] += hit
                count[1] += 1
    return counts


@torch.inference_mode()
def perplexity(model: PreTrainedModel, texts: Iterable[str]) -> float:
    """Measure perplexity per word over texts, the first word of each given."""
    nats, words = 0.0, 0
    for text in texts:
        ids = encode(text)
        logits = model(ids).logits[0, :-1]
        nats += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        words += ids.shape[1] - 1
    return math.exp(nats / words)


@torch.inference_mode()
def talk(model: PreTrainedModel, conversations: Iterable[dict[str, Any]]) -> dict[str, list[int]]:
    """Count right turns of conversations by what a turn leans on; true answers are fed back."""
    counts: dict[str, list[int]] = {}
    for row in conversations:
        said = row["story"].split()
        asked = []
        for prompt, answer in zip(row["questions"], row["answers"]["input_text"], strict=True):
            said += [*prompt.split(), answer, "."]
            asked.append((len(said) - 2, prompt))
        ids = encode(" ".join(said))
        guessed = model(ids).logits[0].argmax(-1)  # (T,)
        for index, prompt in asked:
            count = counts.setdefault(leans_on(prompt), [0, 0])
            count[0] += bool(guessed[index - 1] == ids[0, index])
            count[1] += 1
    return counts


def leans_on(prompt: str) -> str:
    """Tell turns that lean on the last question (and) or person (pronoun) from whole ones."""
    first, *_, last = prompt.split()
    return "and" if first == "and" else "pronoun" if last in ("him", "her") else "whole"
