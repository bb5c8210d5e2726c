"""Reading lessons: a story with questions and answers in between and after it.

Models learn from lessons, and maps are calibrated on them. A lesson marks which
of its words are answers, so that a loss can weigh them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kvmap.demo.questions import ask
from kvmap.demo.story import LONGEST_PROSE, OPENING, Fact, Size, State, invent, prose_sentence
from kvmap.demo.turns import converse

SIZES = {
    # 0 is a first lesson: nothing changes yet. From 1 on every kind of question can be asked.
    0: Size(people=3, likes=3, jobs=3, owners=2, colors=2, movers=0, held=0, changes=0),
    1: Size(people=2, likes=2, jobs=0, owners=1, colors=0, movers=1, held=0, changes=2),
    2: Size(people=3, likes=3, jobs=2, owners=2, colors=1, movers=1, held=1, changes=2),
    3: Size(people=4, likes=4, jobs=3, owners=3, colors=2, movers=2, held=1, changes=3),
    4: Size(people=5, likes=5, jobs=3, owners=4, colors=3, movers=2, held=2, changes=3),
    5: Size(people=6, likes=6, jobs=4, owners=5, colors=3, movers=3, held=2, changes=3),
}


LENGTHS = {1: 64, 2: 110, 3: 200, 4: 900, 5: 1800}  # words from which a document is of that size


def size_for(tokens: int) -> Size:
    """Choose the largest size a document of `tokens` words may have."""
    return SIZES[max(size for size, least in LENGTHS.items() if least <= max(tokens, LENGTHS[1]))]


@dataclass
class Lesson:
    """Words, and for each whether it is an answer."""

    words: list[str] = field(default_factory=list)
    answers: list[bool] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # one per answer, in order

    def say(self, text: str) -> None:
        """Add plain words."""
        spoken = text.split()
        self.words += spoken
        self.answers += [False] * len(spoken)

    def turn(self, prompt: str, answer: str, kind: str) -> None:
        """Add a question, its answer and a full stop."""
        self.say(f"{prompt} {answer} .")
        self.answers[-2] = True
        self.kinds.append(kind)


Extra = tuple[int, Callable[[Lesson, State], None]]  # before which fact, and what to add there


def lesson(
    rng: Random, size: Size, tokens: int, kinds: tuple[str, ...], asking: float, talk: float = 0.0
) -> Lesson:
    """Write a lesson of about `tokens` words.

    Args:
        asking: share of the room beside the facts that goes to questions; prose takes the rest.
        talk: probability that the questions after the story are a conversation.
    """
    facts = invent(rng, size)
    room = max(tokens - _spoken(facts), 0)
    asked = int(room * asking / 6)  # a turn is about six words
    middle = sum(rng.random() < 0.5 for _ in range(asked))
    asker = _asker(rng, kinds)
    extras = [(rng.randint(2, max(len(facts), 2)), asker) for _ in range(middle)]
    extras += [_prose(rng, facts) for _ in range(int(room * (1 - asking) / 9))]
    rng.shuffle(extras)
    made, state = _tell(facts, extras)
    if rng.random() < talk:
        for turn in converse(state, rng, asked - middle):
            made.turn(turn.prompt, turn.answer, f"talk_{turn.move}")
    else:
        for question in ask(state, rng, kinds, asked - middle):
            made.turn(question.prompt, question.answer, question.kind)
    return made


def write(rng: Random, size: Size, tokens: int) -> tuple[Lesson, State]:
    """Write a story of at most `tokens` words, filled with prose; say what is true at its end."""
    facts = invent(rng, size)
    extras: list[Extra] = []
    room = tokens - _spoken(facts)
    while room >= LONGEST_PROSE:
        sentence = prose_sentence(rng)
        room -= len(sentence.split())
        extras.append((rng.randint(0, len(facts)), _sayer(sentence)))
    return _tell(facts, extras)


def _tell(facts: list[Fact], extras: list[Extra]) -> tuple[Lesson, State]:
    """Tell the facts in order, and before each what was placed there."""
    made, state = Lesson(), State()
    made.say(OPENING)
    for index in range(len(facts) + 1):
        for where, add in extras:
            if where == index:
                add(made, state)
        if index < len(facts):
            state.learn(*facts[index].told)
            made.say(facts[index].sentence)
    return made, state


def _asker(rng: Random, kinds: tuple[str, ...]) -> Callable[[Lesson, State], None]:
    """Make what asks of the state so far, unless that has been asked and answered alike."""
    seen: set[tuple[str, str]] = set()

    def add(made: Lesson, state: State) -> None:
        for question in ask(state, rng, kinds, 1):
            if (question.prompt, question.answer) not in seen:
                made.turn(question.prompt, question.answer, question.kind)
                seen.add((question.prompt, question.answer))

    return add


def _prose(rng: Random, facts: list[Fact]) -> Extra:
    return rng.randint(0, len(facts)), _sayer(prose_sentence(rng))


def _sayer(sentence: str) -> Callable[[Lesson, State], None]:
    return lambda made, _: made.say(sentence)


def _spoken(facts: list[Fact]) -> int:
    return sum(len(fact.sentence.split()) for fact in facts) + len(OPENING.split())
