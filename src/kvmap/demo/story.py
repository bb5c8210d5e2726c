"""Stories: facts told one after the other, and what is true after each of them.

A story is a list of sentences. A `State` holds what a reader knows after the
sentences told so far; questions are asked of a state (see `questions`), so the
same code asks in the middle of a story and at its end.

People are served a food, called by a job, given a thing, paid coins; things
given are painted a colour. These never change. Over the four times of a day
roads lead people elsewhere and people hand one another things that nobody owns:
those facts change. In every sentence the value follows right after its subject.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from kvmap.demo import words

OPENING = "here is a story ."
LONGEST_PROSE = 18  # words in the longest sentence of prose


@dataclass
class State:
    """What is true after the sentences told so far."""

    likes: dict[str, str] = field(default_factory=dict)  # name → food
    job: dict[str, str] = field(default_factory=dict)  # name → job
    owns: dict[str, str] = field(default_factory=dict)  # name → thing
    coins: dict[str, str] = field(default_factory=dict)  # name → number
    color: dict[str, str] = field(default_factory=dict)  # thing → colour
    place: dict[str, list[str]] = field(default_factory=dict)  # name → places, latest last
    holder: dict[str, list[str]] = field(default_factory=dict)  # thing → names, latest last

    def learn(self, relation: str, subject: str, value: str) -> None:
        """Take in one fact."""
        known = getattr(self, relation)
        if relation in ("place", "holder"):
            known.setdefault(subject, []).append(value)
        else:
            known[subject] = value


@dataclass(frozen=True)
class Fact:
    """One thing a story tells, and the sentence that tells it."""

    relation: str
    subject: str
    value: str
    sentence: str

    @property
    def told(self) -> tuple[str, str, str]:
        """What a reader learns."""
        return self.relation, self.subject, self.value


@dataclass(frozen=True)
class Size:
    """How much a story tells: counts of facts by relation, and changes per changing thing."""

    people: int
    likes: int
    jobs: int
    owners: int
    colors: int
    movers: int
    held: int
    changes: int


def static_facts(rng: Random, people: list[str], things: list[str], size: Size) -> list[Fact]:
    """Invent what stays true all day; owners also have a food or a job, to be asked through."""
    pay = spread_numbers(rng, len(people))
    facts = [
        Fact("coins", n, c, f"banks pay {n} {c} coins .") for n, c in zip(people, pay, strict=True)
    ]
    served = _pair(rng, people, rng.sample(words.FOODS, size.likes))
    facts += [Fact("likes", n, f, f"they serve {n} {f} .") for n, f in served]
    called = _pair(rng, people, rng.sample(words.JOBS, size.jobs))
    facts += [Fact("job", n, j, f"people call {n} {j} .") for n, j in called]
    rng.shuffle(facts)
    owners = _pair(rng, sorted({n for n, _ in served + called}), things)
    belongings = [Fact("owns", n, t, f"friends gave {n} {t} .") for n, t in owners]
    painted = _pair(rng, [t for _, t in owners], rng.sample(words.COLORS, size.colors))
    belongings += [Fact("color", t, c, f"artists paint {t} {c} .") for t, c in painted]
    rng.shuffle(belongings)
    return facts + belongings


def changing_facts(rng: Random, people: list[str], things: list[str], size: Size) -> list[Fact]:
    """Invent the day's events in order of time; nobody and nothing changes twice at one time."""
    events = []
    for name in rng.sample(people, size.movers):
        route: list[str] = []
        for when in _times(rng, size.changes):
            options = [p for p in words.PLACES if not route or p != route[-1]]
            back = len(route) > 1 and rng.random() < 0.4
            where = route[0] if back and route[0] != route[-1] else rng.choice(options)
            verb = "return" if where in route else "lead"
            route.append(where)
            told = f"at {words.TIMES[when]} roads {verb} {name} {where} ."
            events.append((when, rng.random(), Fact("place", name, where, told)))
    for thing in things[: size.held]:
        holder = None
        for when in _times(rng, size.changes):
            taker = rng.choice([n for n in people if n != holder])
            giver = f"{holder} hands" if holder else "merchants hand"
            told = f"at {words.TIMES[when]} {giver} {taker} {thing} ."
            holder = taker
            events.append((when, rng.random(), Fact("holder", thing, taker, told)))
    return [fact for *_, fact in sorted(events, key=lambda event: event[:2])]


def invent(rng: Random, size: Size) -> list[Fact]:
    """Invent a story's facts in the order they are told."""
    people = rng.sample(words.NAMES, size.people)
    things = rng.sample(words.THINGS, size.owners + size.held)
    owned, held = things[: size.owners], things[size.owners :]
    return static_facts(rng, people, owned, size) + changing_facts(rng, people, held, size)


def spread_numbers(rng: Random, count: int) -> list[str]:
    """Draw distinct numbers whose largest and smallest stand two clear of the next."""
    while True:
        drawn = sorted(rng.sample(range(len(words.NUMBERS)), count))
        if count < 2 or (drawn[1] - drawn[0] > 1 and drawn[-1] - drawn[-2] > 1):
            rng.shuffle(drawn)
            return [words.NUMBERS[i] for i in drawn]


def prose_sentence(rng: Random) -> str:
    """Say something about wind and weather that no question asks about."""
    clause = _clause(rng)
    if rng.random() < 0.4:
        clause += f" {rng.choice(words.LINKS)} {_clause(rng)}"
    return f"{clause} ."


def _clause(rng: Random) -> str:
    near = f"{rng.choice(words.PREPOSITIONS)} the {rng.choice(words.NOUNS)}"
    end = near if rng.random() < 0.6 else rng.choice(words.ADVERBS)
    adjective = f"{rng.choice(words.ADJECTIVES)} " if rng.random() < 0.7 else ""
    return f"the {adjective}{rng.choice(words.NOUNS)} {rng.choice(words.VERBS)} {end}"


def _pair(rng: Random, subjects: list[str], values: Sequence[str]) -> list[tuple[str, str]]:
    """Give values to subjects drawn at random, none twice; what is over goes to nobody."""
    count = min(len(subjects), len(values))
    return list(zip(rng.sample(subjects, count), values[:count], strict=True))


def _times(rng: Random, changes: int) -> list[int]:
    """Draw the times, in order, at which something changes: at least two where two are allowed."""
    count = rng.randint(min(2, changes), changes)
    return sorted(rng.sample(range(len(words.TIMES)), count))
