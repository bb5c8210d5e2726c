"""The demo world: documents, questions, tasks, conversations and calibration text from seeds.

Everything here is invented by a random generator; nothing is copied. A prompt is
`document.text + " " + question.prompt` and the next word is the answer. The
three splits draw from ranges of seeds that do not meet, so no split ever sees a
document of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Any

from kvmap.demo.lessons import LENGTHS, SIZES, lesson, size_for, write
from kvmap.demo.questions import KINDS, Question, ask
from kvmap.demo.story import Size, prose_sentence
from kvmap.demo.turns import converse

__all__ = [
    "KINDS", "SPLITS", "Document", "Question",
    "calibration_texts", "conversations", "documents", "seed_of",
]  # fmt: skip

SPLITS = ("train", "calibration", "evaluation")
SHORTEST, LONGEST = 64, 4096


@dataclass(frozen=True)
class Document:
    """A story, questions about it, and the seed that makes both."""

    text: str
    questions: tuple[Question, ...]
    seed: int


def seed_of(split: str, *path: object) -> int:
    """Name a random generator: the split in the high bits, a digest of `path` in the low 48.

    Raises:
        ValueError: if there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"split: found {split!r}, expected one of {', '.join(SPLITS)}")
    digest = blake2b("/".join(map(str, path)).encode(), digest_size=6).digest()
    return (SPLITS.index(split) << 48) + int.from_bytes(digest)


def documents(
    split: str, count: int, tokens: int, seed: int = 0, questions: int = 8
) -> Iterator[Document]:
    """Write documents of at most `tokens` words, filled with prose to within a sentence of that.

    Args:
        questions: asked of each, the kinds taking turns; fewer where a short story has no more.

    Raises:
        ValueError: if there is no such split, or `tokens` is outside 64..4096.
    """
    _check_length(tokens)
    for index in range(count):
        number = seed_of(split, "document", seed, tokens, index)
        rng = Random(number)
        told, state = write(rng, size_for(tokens), tokens)
        yield Document(" ".join(told.words), tuple(ask(state, rng, KINDS, questions)), number)


def calibration_texts(count: int, tokens: int, seed: int = 0) -> Iterator[str]:
    """Write texts of at least `tokens` words: stories with questions, answers and conversations."""
    for index in range(count):
        rng = Random(seed_of("calibration", "text", seed, tokens, index))
        room = max(tokens, SHORTEST)
        made = lesson(rng, _size_within(rng, room), room, KINDS, rng.uniform(0.1, 0.8), talk=0.35)
        while len(made.words) < tokens:
            made.say(prose_sentence(rng))
        yield " ".join(made.words)


def conversations(
    split: str, count: int, tokens: int, turns: int = 10, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Hold conversations about documents, in CoQA's columns.

    Later questions lean on earlier ones, so each is asked after the whole
    conversation so far: story, then question, answer and "." turn by turn.
    """
    _check_length(tokens)
    for index in range(count):
        rng = Random(seed_of(split, "conversation", seed, tokens, index))
        told, state = write(rng, size_for(tokens), tokens)
        held = converse(state, rng, turns)
        spans = [_span(told.words, turn.answer) for turn in held]
        yield {
            "source": "demo",
            "story": " ".join(told.words),
            "questions": [turn.prompt for turn in held],
            "answers": {
                "input_text": [turn.answer for turn in held],
                "answer_start": [start for start, _ in spans],
                "answer_end": [end for _, end in spans],
            },
        }


def _size_within(rng: Random, tokens: int) -> Size:
    """Draw any size of story up to the largest that fits."""
    return rng.choice([SIZES[k] for k in LENGTHS if SIZES[k].people <= size_for(tokens).people])


def _span(said: list[str], word: str) -> tuple[int, int]:
    """Find the characters of the last time a word is said."""
    last = len(said) - 1 - said[::-1].index(word)
    start = len(" ".join(said[:last])) + 1
    return start, start + len(word)


def _check_length(tokens: int) -> None:
    if not SHORTEST <= tokens <= LONGEST:
        raise ValueError(f"tokens: found {tokens}, expected {SHORTEST} to {LONGEST}")
