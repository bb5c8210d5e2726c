"""Questions about a story, one word to answer each.

A question is asked of a `State`. The five kinds differ in what a model must do:
recall reads a fact forwards, reverse backwards, two_hop joins two facts through
an owner, latest takes the last of several changes, compare finds an extreme.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from kvmap.demo import words
from kvmap.demo.story import State

KINDS = ("recall", "reverse", "two_hop", "latest", "compare")
CHOICES = 12


@dataclass(frozen=True)
class Question:
    """A question, its one-word answer and the words it is chosen among."""

    kind: str
    prompt: str
    answer: str
    choices: tuple[str, ...]


Asked = tuple[str, str, str]  # prompt, answer, class of the answer


def recall(state: State) -> list[Asked]:
    """Ask for the value of a fact."""
    asked = [(f"so they serve {n}", f, "food") for n, f in state.likes.items()]
    asked += [(f"so people call {n}", j, "job") for n, j in state.job.items()]
    asked += [(f"so friends gave {n}", t, "thing") for n, t in state.owns.items()]
    asked += [(f"so banks pay {n}", c, "number") for n, c in state.coins.items()]
    asked += [(f"so artists paint {t}", c, "color") for t, c in state.color.items()]
    return asked


def reverse(state: State) -> list[Asked]:
    """Ask for the subject of a fact."""
    asked = [(f"so who gets {f}", n, "name") for n, f in state.likes.items()]
    asked += [(f"so who works as {j}", n, "name") for n, j in state.job.items()]
    asked += [(f"so who owns {t}", n, "name") for n, t in state.owns.items()]
    asked += [(f"so what looks {c}", t, "thing") for t, c in state.color.items()]
    return asked


def two_hop(state: State) -> list[Asked]:
    """Ask about the owner of a thing without naming the owner."""
    asked = []
    for name, thing in state.owns.items():
        if name in state.likes:
            asked.append((f"so they serve the owner of {thing}", state.likes[name], "food"))
        if name in state.job:
            asked.append((f"so people call the owner of {thing}", state.job[name], "job"))
    return asked


def latest(state: State) -> list[Asked]:
    """Ask where someone is or who has something now; of what changed, where anything did."""
    asked = [(h, f"so roads now lead {n}", h[-1], "place") for n, h in state.place.items()]
    asked += [(h, f"so who now holds {t}", h[-1], "name") for t, h in state.holder.items()]
    changed = [item for item in asked if len(item[0]) > 1]
    return [(prompt, answer, kind) for _, prompt, answer, kind in changed or asked]


def compare(state: State) -> list[Asked]:
    """Ask who is paid most or least, once two people are paid."""
    if len(state.coins) < 2:
        return []
    ordered = sorted(state.coins, key=lambda name: words.NUMBERS.index(state.coins[name]))
    return [
        ("so banks pay most to", ordered[-1], "name"),
        ("so banks pay least to", ordered[0], "name"),
    ]


ASK: dict[str, Callable[[State], list[Asked]]] = {
    "recall": recall,
    "reverse": reverse,
    "two_hop": two_hop,
    "latest": latest,
    "compare": compare,
}


def ask(state: State, rng: Random, kinds: tuple[str, ...], count: int) -> list[Question]:
    """Ask up to `count` different questions, the kinds taking turns from a random first one."""
    waiting = {kind: ASK[kind](state) for kind in kinds}
    for asked in waiting.values():
        rng.shuffle(asked)
    order = list(kinds)
    rng.shuffle(order)
    questions: list[Question] = []
    while len(questions) < count and any(waiting.values()):
        for kind in order:
            if waiting[kind] and len(questions) < count:
                questions.append(_with_choices(kind, waiting[kind].pop(), state, rng))
    return questions


def _with_choices(kind: str, asked: Asked, state: State, rng: Random) -> Question:
    """Add wrong answers of the same class, those the story mentions first."""
    prompt, answer, group = asked
    mentioned = _mentioned(state) & set(words.CLASSES[group]) - {answer}
    near = sorted(mentioned)
    far = [w for w in words.CLASSES[group] if w not in mentioned and w != answer]
    rng.shuffle(near)
    wrong = (near + rng.sample(far, len(far)))[: CHOICES - 1]
    choices = [answer, *wrong]
    rng.shuffle(choices)
    return Question(kind, prompt, answer, tuple(choices))


def _mentioned(state: State) -> set[str]:
    found: set[str] = set()
    for relation in (state.likes, state.job, state.owns, state.coins, state.color):
        found.update(relation, relation.values())
    for relation in (state.place, state.holder):
        found.update(relation, *relation.values())
    return found
