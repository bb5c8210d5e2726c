"""What is asked: a task is items, an item a context with probes, all of them token ids.

The context is what the source reads and the map carries over. A probe's prompt follows it
and is run natively by whoever answers, so the cache's last logits are never needed: every
prompt holds at least one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch import Tensor

from kvmap.errors import UsageError
from kvmap.models import LoadedModel

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Probe:
    """One question about a context.

    Attributes:
        prompt: At least one token.
        answer: The right continuation; likelihood, divergence and agreement are taken on it.
        choices: What is chosen among by likelihood; empty where nothing is.
        gold: Which choice is right.
        references: Right answers as text, where the answer is generated freely.
        closing: What follows the answer before the next question, in a conversation.
        labels: What reports group by, e.g. {"kind": "recall"}.
    """

    prompt: Ids
    answer: Ids
    choices: tuple[Ids, ...] = ()
    gold: int = 0
    references: tuple[str, ...] = ()
    closing: Ids = ()
    labels: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.prompt, "a probe's prompt holds at least one token"
        assert self.answer, "a probe has an answer to take the likelihood of"


@dataclass(frozen=True)
class Item:
    """A context and what is asked about it; see `documents` for the units that are resampled."""

    context: Ids
    probes: tuple[Probe, ...]

    def longest(self, produced: int = 0, together: bool = False) -> int:
        """Return the tokens of the context with its longest prompt and continuation.

        Args:
            produced: Tokens generated where an answer is free.
            together: The questions follow one another, each over all that was said before.
        """
        tails = [
            len(p.prompt)
            + max(len(p.answer), *map(len, p.choices), produced if p.references else 0)
            + len(p.closing)
            for p in self.probes
        ]
        return len(self.context) + (sum(tails) if together else max(tails, default=0))


@dataclass(frozen=True)
class Task:
    """Items under a name.

    Attributes:
        chance: Accuracy of guessing; None where nothing can be right.
        history: None where an item's questions stand apart. In a conversation, what earlier
            turns are taken to have answered: "own", what was said, or "gold".
    """

    name: str
    items: tuple[Item, ...]
    chance: float | None = None
    max_new_tokens: int = 16
    history: str | None = None

    @property
    def probes(self) -> int:
        """Number of questions over all items."""
        return sum(len(item.probes) for item in self.items)

    @cached_property
    def longest(self) -> int:
        """Tokens that a model reads at most."""
        together = self.history is not None
        return max(item.longest(self.max_new_tokens, together) for item in self.items)


def limited(task: Task, limit: int | None) -> Task:
    """Return the task with its first `limit` probes, whole items as far as they go."""
    if limit is None:
        return task
    kept, room = [], limit
    for item in task.items:
        if room <= 0:
            break
        kept.append(replace(item, probes=item.probes[:room]))
        room -= len(item.probes)
    return replace(task, items=tuple(kept))


def check(task: Task, *models: LoadedModel) -> None:
    """Refuse a task without questions, or one whose contexts a model cannot read.

    Raises:
        UsageError: Saying which.
    """
    if not task.probes:
        # Tasks say themselves what else they lack.
        raise UsageError(f"task {task.name} has no items; ask for one at least with --limit")
    for loaded in models:
        loaded.require_positions(task.longest, f"task {task.name}", "pass a smaller --length")


def documents(items: Sequence[Item]) -> list[int]:
    """Return the number of each item's document: what comes again word for word is the same one."""
    first: dict[tuple[Ids, ...], int] = {}
    return [
        first.setdefault((item.context, *(p.prompt + p.answer for p in item.probes)), at)
        for at, item in enumerate(items)
    ]


def wrong_context(items: Sequence[Item], index: int) -> Ids:
    """Return another document of exactly the length of item `index`'s context.

    The following documents are joined as far as needed. One document alone has no
    other: it is turned by half, which at least moves every fact.
    """
    context = items[index].context
    others = [item.context for item in (*items[index + 1 :], *items[:index])]
    others = [other for other in others if other and other != context]
    if not others:
        half = len(context) // 2
        return context[half:] + context[:half]
    return tuple(islice(chain.from_iterable(cycle(others)), len(context)))


def encode(tokenizer: Any, text: str, special: bool = False) -> Ids:
    """Return a text's token ids; `special` adds what the tokenizer opens a text with."""
    # A chat template has often written the first special token already.
    begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids = tokenizer(text, add_special_tokens=special and not begun, verbose=False)["input_ids"]
    return tuple(ids)


def tensor(ids: Sequence[int]) -> Tensor:
    """Return token ids as a batch of one: [1, T]."""
    return torch.tensor([list(ids)], dtype=torch.long)
