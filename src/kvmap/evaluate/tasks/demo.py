"""Questions about the embedded world's documents, by kind and length, chosen among words."""

from __future__ import annotations

from typing import Any

from kvmap.demo import world
from kvmap.errors import UsageError
from kvmap.evaluate.items import Item, Probe, Task, encode
from kvmap.evaluate.tasks.options import TaskOptions

LENGTHS = (512,)
QUESTIONS = 5  # per document: one of each kind


def demo(options: TaskOptions) -> Task:
    """Return documents of each length with their questions; `limit` questions over all lengths.

    Raises:
        UsageError: A length the world cannot write.
    """
    lengths = options.lengths or LENGTHS
    share = -(-options.generated // len(lengths))
    items = [item for length in lengths for item in _items(options, length, share)]
    choices = [len(probe.choices) for item in items for probe in item.probes]
    chance = sum(1 / count for count in choices) / max(len(choices), 1)
    return Task("demo", tuple(items), chance)


def check_length(task: str, length: int) -> None:
    """Check that the world writes documents of a length.

    Raises:
        UsageError: It does not.
    """
    if not world.SHORTEST <= length <= world.LONGEST:
        raise UsageError(
            f"task {task} writes documents of {world.SHORTEST} to {world.LONGEST} words, "
            f"found --length {length}"
        )


def _items(options: TaskOptions, length: int, limit: int) -> list[Item]:
    check_length("demo", length)
    count = -(-limit // QUESTIONS)
    items, room = [], limit
    for document in world.documents("evaluation", count, length, options.seed, QUESTIONS):
        asked = document.questions[:room]
        room -= len(asked)
        probes = tuple(_probe(options.tokenizer, question, length) for question in asked)
        items.append(Item(encode(options.tokenizer, document.text, special=True), probes))
    return [item for item in items if item.probes]


def _probe(tokenizer: Any, question: world.Question, length: int) -> Probe:
    choices = tuple(encode(tokenizer, f" {choice}") for choice in question.choices)
    gold = question.choices.index(question.answer)
    return Probe(
        prompt=encode(tokenizer, f" {question.prompt}"),
        answer=choices[gold],
        choices=choices,
        gold=gold,
        labels={"kind": question.kind, "length": length},
    )
