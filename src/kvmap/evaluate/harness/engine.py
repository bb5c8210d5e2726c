"""Answer the harness's requests for all arms at once, from caches made once per context.

Requests are grouped by context; a context's caches live while its requests are answered, and
only numbers and texts are kept. So the first arm's evaluation does the work and the others
look it up. What is kept goes to the evaluation's journal too, context by context, so that an
interrupted task goes on where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvmap import metrics
from kvmap.cache import KVCache
from kvmap.evaluate.arms import Pair, caches
from kvmap.evaluate.items import Ids, Item, Probe, wrong_context
from kvmap.evaluate.journal import Journal
from kvmap.evaluate.scoring import Answer, ask
from kvmap.geometry import json_digest
from kvmap.models import LoadedModel, generate

Pairing = tuple[Ids, Ids]
# Greedy tokens between two looks for a stop string.
STEP = 32


@dataclass(frozen=True)
class Likelihood:
    """A continuation's nats, divergence from native and agreement, by token; `greedy` overall."""

    nll: list[float]
    kl: list[float]
    top1: list[float]
    greedy: bool

    @property
    def total(self) -> float:
        """Log-likelihood in nats."""
        return -sum(self.nll)


@dataclass(frozen=True)
class Wish:
    """A request to generate: context, where to stop, and after how many tokens at most."""

    context: Ids
    until: tuple[str, ...]
    max_new_tokens: int


@dataclass(frozen=True, eq=False)
class Kept:
    """A task's part of the journal."""

    journal: Journal = field(default_factory=Journal)
    task: str = ""

    def __call__(self, asked: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what was kept of a request, made and kept first where it is new."""
        key = json_digest(asked)
        found = self.journal.get(self.task, key)
        if found is None:
            found = make()
            self.journal.put(self.task, key, found)
        return found


class Engine:
    """Answers by arm and request, filled as they are asked for."""

    def __init__(
        self,
        pair: Pair,
        arms: Sequence[str],
        progress: Callable[[int, int], None],
        kept: Kept | None = None,
    ) -> None:
        self.pair = pair
        self.arms = tuple(arms)
        self.progress = progress
        self.kept = kept or Kept()
        self.likelihoods: dict[tuple[str, Pairing], Likelihood] = {}
        self.texts: dict[tuple[str, Wish], str] = {}

    @property
    def max_length(self) -> int:
        """Positions that both models have."""
        sides = (self.pair.source, self.pair.target)
        return min(side.signature.geometry.max_positions or 2**31 for side in sides)

    def score(self, requests: Sequence[Pairing]) -> None:
        """Fill in the likelihoods of continuations given contexts of at least one token."""
        grouped: dict[Ids, dict[Ids, None]] = {}
        for context, continuation in requests:
            if ("native", (context, continuation)) not in self.likelihoods:
                grouped.setdefault(context, {})[continuation] = None
        items = [
            Item(context[:-1], tuple(Probe(context[-1:], answer) for answer in answers))
            for context, answers in grouped.items()
        ]
        for index, item in enumerate(items):
            self._check(item.longest())
            self.progress(index, len(items))
            wrong = wrong_context(items, index)
            by_arm = self.kept(asdict(item), lambda item=item, wrong=wrong: self._ask(item, wrong))
            for arm, found in by_arm.items():
                for probe, part in zip(item.probes, found, strict=True):
                    pairing = (item.context + probe.prompt, probe.answer)
                    self.likelihoods[arm, pairing] = Likelihood(**part)
        self.progress(len(items), len(items))

    def _ask(self, item: Item, wrong: Ids) -> dict[str, list[dict[str, Any]]]:
        """Return the likelihoods of an item's continuations by arm, as plain data."""
        found = {}
        native: list[Answer] = []
        for arm, reader, cache in caches(self.pair, item.context, wrong, self.arms):
            answers = ask(reader, cache, item.probes)
            native = native or answers
            found[arm] = [
                asdict(likelihood(answer.logits, own.logits, probe.answer))
                for probe, answer, own in zip(item.probes, answers, native, strict=True)
            ]
        return found

    def speak(self, wishes: Sequence[Wish]) -> None:
        """Fill in greedy texts."""
        waiting = [wish for wish in dict.fromkeys(wishes) if ("native", wish) not in self.texts]
        items = [Item(wish.context[:-1], ()) for wish in waiting]
        for index, wish in enumerate(waiting):
            self._check(len(wish.context) + wish.max_new_tokens)
            self.progress(index, len(items))
            wrong = wrong_context(items, index)
            by_arm = self.kept(asdict(wish), lambda wish=wish, wrong=wrong: self._say(wish, wrong))
            self.texts |= {(arm, wish): text for arm, text in by_arm.items()}
        self.progress(len(items), len(items))

    def _say(self, wish: Wish, wrong: Ids) -> dict[str, str]:
        """Return a wish's texts by arm."""
        return {
            arm: speak(reader, cache, wish)
            for arm, reader, cache in caches(self.pair, wish.context[:-1], wrong, self.arms)
        }

    def _check(self, tokens: int) -> None:
        for side in (self.pair.source, self.pair.target):
            side.require_positions(tokens, "the task", "pass a smaller --few-shot")


def likelihood(logits: Tensor, native: Tensor, answer: Ids) -> Likelihood:
    """Return a continuation's figures from logits [A, V] that predict it."""
    gold = torch.tensor(answer, device=logits.device)
    native = native.to(logits.device)
    return Likelihood(
        metrics.negative_log_likelihood(logits, gold).tolist(),
        metrics.kl_divergence(native, logits).tolist(),
        metrics.top1_agreement(native, logits).float().tolist(),
        bool((logits.argmax(-1) == gold).all()),
    )


def speak(loaded: LoadedModel, cache: KVCache | None, wish: Wish) -> str:
    """Generate greedily until a stop string, the end token, or the most tokens allowed.

    Without a cache the context is left out, but for its last token.
    """
    read = wish.context if cache is not None else wish.context[-1:]
    produced: Ids = ()
    while len(produced) < wish.max_new_tokens:
        prompt = torch.tensor([read + produced])
        step = min(STEP, wish.max_new_tokens - len(produced))
        new = generate(loaded, cache, prompt, step)[0].tolist()
        produced += tuple(new)
        text = loaded.tokenizer.decode(produced, skip_special_tokens=True)
        if len(new) < step or any(stop in text for stop in wish.until):
            break
    for stop in wish.until:
        text = text.split(stop)[0] if stop else text
    return text
