"""Scores of one task: rows are probes or tokens, columns are arms.

A record holds one item's scores and is what an interrupted evaluation keeps; scores join
records. NaN stands for what does not apply: an arm that cannot exist, a question that no
answer can be right about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvmap import metrics
from kvmap.evaluate.items import Probe
from kvmap.evaluate.scoring import Answer, accuracy


@dataclass(frozen=True)
class Record:
    """One item's scores as JSON-ready lists.

    Attributes:
        unit: Number of the document or conversation.
        labels: Per probe.
        accuracy: [probe][arm].
        tokens: Per probe, how many tokens its answer has.
        nll: [token][arm] nats, all probes' tokens joined; kl and top1 alike.
    """

    unit: int
    labels: list[dict[str, Any]]
    accuracy: list[list[float]]
    tokens: list[int]
    nll: list[list[float]]
    kl: list[list[float]]
    top1: list[list[float]]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def record(
    unit: int, probes: Sequence[Probe], answers: dict[str, list[Answer]], arms: Sequence[str]
) -> Record:
    """Score an item's answers by arm, where there are any; divergence is from "native"."""
    native = answers["native"]
    columns = {arm: _columns(probes, answers.get(arm), native) for arm in arms}
    stack = lambda name: torch.stack([columns[arm][name] for arm in arms], 1).tolist()  # noqa: E731
    return Record(
        unit=unit,
        labels=[dict(probe.labels) for probe in probes],
        accuracy=stack("accuracy"),
        tokens=[len(probe.answer) for probe in probes],
        nll=stack("nll"),
        kl=stack("kl"),
        top1=stack("top1"),
    )


def _columns(
    probes: Sequence[Probe], answers: list[Answer] | None, native: list[Answer]
) -> dict[str, Tensor]:
    """Return one arm's scores: accuracy [P], the rest [M] over all answers' tokens."""
    if answers is None:
        missing = torch.full((sum(len(probe.answer) for probe in probes),), torch.nan)
        return {"accuracy": torch.full((len(probes),), torch.nan)} | dict.fromkeys(
            ("nll", "kl", "top1"), missing
        )
    parts: dict[str, list[Tensor]] = {"nll": [], "kl": [], "top1": []}
    for probe, answer, own in zip(probes, answers, native, strict=True):
        own_logits = own.logits.to(answer.logits.device)
        gold = torch.tensor(probe.answer, device=answer.logits.device)
        parts["nll"].append(metrics.negative_log_likelihood(answer.logits, gold))
        parts["kl"].append(metrics.kl_divergence(own_logits, answer.logits))
        parts["top1"].append(metrics.top1_agreement(own_logits, answer.logits).float())
    right = [accuracy(probe, answer) for probe, answer in zip(probes, answers, strict=True)]
    return {"accuracy": torch.tensor(right)} | {
        name: torch.cat(part).cpu() for name, part in parts.items()
    }


@dataclass(frozen=True, eq=False)
class Scores:
    """A task's scores.

    Attributes:
        labels: N, one per probe.
        units: [N] document or conversation of each probe.
        accuracy: [N, A].
        token_rows: [M] the probe each answer token belongs to.
        nll: [M, A] nats per token; kl and top1 alike.
    """

    task: str
    chance: float | None
    arms: tuple[str, ...]
    labels: tuple[dict[str, Any], ...]
    units: Tensor
    accuracy: Tensor
    token_rows: Tensor
    nll: Tensor
    kl: Tensor
    top1: Tensor

    @property
    def documents(self) -> int:
        """Number of different units."""
        return len(self.units.unique())

    @property
    def token_units(self) -> Tensor:
        """[M] document of each token."""
        return self.units[self.token_rows]

    def column(self, name: str, arm: str) -> Tensor:
        """Return one arm's values of "accuracy", "nll", "kl" or "top1"."""
        return getattr(self, name)[:, self.arms.index(arm)]

    def where(self, keep: Callable[[dict[str, Any]], bool]) -> Scores:
        """Return the probes whose labels pass."""
        rows = torch.tensor([bool(keep(labels)) for labels in self.labels], dtype=torch.bool)
        tokens = rows[self.token_rows]
        renumbered = rows.cumsum(0) - 1
        return Scores(
            self.task,
            self.chance,
            self.arms,
            tuple(labels for labels, kept in zip(self.labels, rows.tolist(), strict=True) if kept),
            self.units[rows],
            self.accuracy[rows],
            renumbered[self.token_rows[tokens]],
            self.nll[tokens],
            self.kl[tokens],
            self.top1[tokens],
        )


def has_accuracy(scores: Scores) -> bool:
    """Say whether the task's answers can be right or wrong."""
    return bool(scores.column("accuracy", "native").isfinite().all())


def join(records: Sequence[Record], task: str, chance: float | None, arms: Sequence[str]) -> Scores:
    """Join records, in order of their units, into a task's scores."""
    records = sorted(records, key=lambda found: found.unit)
    labels = [label for found in records for label in found.labels]
    units = [found.unit for found in records for _ in found.labels]
    counts = torch.tensor([count for found in records for count in found.tokens], dtype=torch.long)
    table = lambda name: _table([row for r in records for row in getattr(r, name)], len(arms))  # noqa: E731
    return Scores(
        task,
        chance,
        tuple(arms),
        tuple(labels),
        torch.tensor(units, dtype=torch.long),
        table("accuracy"),
        torch.repeat_interleave(torch.arange(len(counts)), counts),
        table("nll"),
        table("kl"),
        table("top1"),
    )


def _table(rows: list[list[float | None]], arms: int) -> Tensor:
    known = [[torch.nan if value is None else value for value in row] for row in rows]
    return torch.tensor(known, dtype=torch.float32).reshape(-1, arms)
