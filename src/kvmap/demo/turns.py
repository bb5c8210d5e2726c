"""Conversations about a story: later questions lean on earlier ones.

Three moves: a whole question ("so they serve mia"), a pronoun for the person
named last ("so people call her"), and the same question about another person
("and tom").
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvmap.demo import words
from kvmap.demo.questions import recall, reverse
from kvmap.demo.story import State

PERSONAL = {
    "likes": "so they serve",
    "job": "so people call",
    "owns": "so friends gave",
    "coins": "so banks pay",
    "place": "so roads now lead",
}


@dataclass(frozen=True)
class Turn:
    """One question as said, its answer, and which of the three moves it is."""

    prompt: str
    answer: str
    move: str


def converse(state: State, rng: Random, count: int) -> list[Turn]:
    """Hold up to `count` turns about a state, leaning on earlier turns where possible."""
    facts = _personal_facts(state)
    turns: list[Turn] = []
    asked: set[tuple[str, str]] = set()
    name = relation = ""
    while len(turns) < count:
        options = [key for key in facts if key not in asked]
        pronoun = [key for key in options if key[0] == name]
        same = [key for key in options if key[1] == relation]
        draw = rng.random()
        if turns and draw < 0.4 and pronoun:
            key, move = rng.choice(pronoun), "pronoun"
        elif turns and draw < 0.7 and same:
            key, move = rng.choice(same), "and"
        elif draw < 0.85 and options:
            key, move = rng.choice(options), "whole"
        else:
            name, relation = _stranger(state, rng, turns), ""
            continue
        asked.add(key)
        name, relation = key
        turns.append(Turn(_say(name, relation, move), facts[key], move))
    return turns


def _stranger(state: State, rng: Random, turns: list[Turn]) -> str:
    """Ask something whole whose answer or subject may be a person; return the person to lean on."""
    prompt, answer, _ = rng.choice(recall(state) + reverse(state))
    turns.append(Turn(prompt, answer, "whole"))
    named = [word for word in (*prompt.split(), answer) if word in words.NAMES]
    return named[-1] if named else ""


def _say(name: str, relation: str, move: str) -> str:
    if move == "and":
        return f"and {name}"
    pronoun = "him" if name in words.MEN else "her"
    return f"{PERSONAL[relation]} {name if move == 'whole' else pronoun}"


def _personal_facts(state: State) -> dict[tuple[str, str], str]:
    facts = {}
    for relation in PERSONAL:
        for name, value in getattr(state, relation).items():
            facts[name, relation] = value[-1] if isinstance(value, list) else value
    return facts
