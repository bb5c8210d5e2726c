"""One fact at a depth of a long context: where does a mapped cache go blind?

The context is the embedded world's prose with a few facts strewn in; one of them, placed at
a share of the length, is asked about. Words are plain English, so any model can be asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from kvmap.demo import questions, words
from kvmap.demo.story import OPENING, Fact, Size, State, prose_sentence, static_facts
from kvmap.demo.world import seed_of
from kvmap.evaluate.items import Ids, Item, Probe, Task, encode
from kvmap.evaluate.tasks.options import TaskOptions

LENGTHS = (1024, 2048)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
FACTS = Size(people=4, likes=3, jobs=2, owners=2, colors=0, movers=0, held=0, changes=0)


def needle(options: TaskOptions) -> Task:
    """Return one question for each of `limit` contexts, spread evenly over depths and lengths."""
    cells = [(length, depth) for length in options.lengths or LENGTHS for depth in DEPTHS]
    rounds = -(-options.generated // len(cells))
    places = [(*cell, index) for index in range(rounds) for cell in cells][: options.generated]
    items = tuple(_item(options, length, depth, index) for length, depth, index in places)
    chance = sum(1 / len(item.probes[0].choices) for item in items) / max(len(items), 1)
    return Task("needle", items, chance)


@dataclass(frozen=True)
class _Needle:
    fact: Fact
    prompt: str
    answer: str
    choices: tuple[str, ...]


def _item(options: TaskOptions, length: int, depth: float, index: int) -> Item:
    rng = Random(seed_of("evaluation", "needle", options.seed, length, depth, index))
    names, things = rng.sample(words.NAMES, 4), rng.sample(words.THINGS, 2)
    facts = static_facts(rng, names, things, FACTS)
    hidden = _hide(rng, facts)
    others = [fact.sentence for fact in facts if fact is not hidden.fact]
    context = _write(options.tokenizer, rng, hidden.fact.sentence, others, (length, depth))
    choices = tuple(encode(options.tokenizer, f" {choice}") for choice in hidden.choices)
    gold = hidden.choices.index(hidden.answer)
    labels = {"length": length, "depth": depth}
    prompt = encode(options.tokenizer, f" {hidden.prompt}")
    return Item(context, (Probe(prompt, choices[gold], choices, gold, labels=labels),))


def _hide(rng: Random, facts: list[Fact]) -> _Needle:
    """Choose a fact and the question that it alone answers."""
    fact = rng.choice([f for f in facts if f.relation in ("likes", "job", "owns", "coins")])
    state = State()
    state.learn(fact.relation, fact.subject, fact.value)
    prompt, answer, group = questions.recall(state)[0]
    wrong = rng.sample([w for w in words.CLASSES[group] if w != answer], questions.CHOICES - 1)
    choices = [answer, *wrong]
    rng.shuffle(choices)
    return _Needle(fact, prompt, answer, tuple(choices))


def _write(
    tokenizer: Any, rng: Random, fact: str, others: list[str], place: tuple[int, float]
) -> Ids:
    """Write prose of about `length` tokens with the fact at `depth` and the rest anywhere."""
    length, depth = place
    used = sum(len(encode(tokenizer, f" {sentence}")) for sentence in (fact, *others))
    used += len(encode(tokenizer, OPENING, special=True))
    body: list[str] = []
    while True:
        sentence = prose_sentence(rng)
        used += len(encode(tokenizer, f" {sentence}"))
        if used > length:
            break
        body.append(sentence)
    for other in others:
        body.insert(rng.randint(0, len(body)), other)
    body.insert(round(depth * len(body)), fact)
    return encode(tokenizer, " ".join((OPENING, *body)), special=True)
