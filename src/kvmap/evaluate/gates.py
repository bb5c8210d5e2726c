"""Floors that stop a pipeline. Each compares the end of an interval that flatters least."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from kvmap.errors import FloorMissed
from kvmap.evaluate import statistics


@dataclass(frozen=True)
class Gates:
    """Floors and one ceiling; None asks nothing.

    `min_cosine` is held against the mean attention-output cosine, `max_kl` (nats per token)
    against the mapped arm's divergence from native.
    """

    min_retention: float | None = None
    min_gap_recovered: float | None = None
    min_margin: float | None = None
    min_cosine: float | None = None
    max_kl: float | None = None


def check(figures: dict[str, Any], gates: Gates) -> list[str]:
    """Return what is missed, one sentence part each, with the reason; empty where all is well.

    A map whose content does not matter fails whatever is asked. Over too few documents no floor
    that rests on answers can be said to be reached.
    """
    missed = []
    if figures["verdict"] == "content-free":
        missed.append("the verdict is content-free: another document's cache does as well")
    for field in fields(gates):
        limit = getattr(gates, field.name)
        if limit is not None:
            missed += _miss(figures, field.name, limit)
    return missed


def _miss(figures: dict[str, Any], name: str, limit: float) -> list[str]:
    what = name.removeprefix("min_").removeprefix("max_")
    point, ends, documents = _figure(figures, what)
    option = f"--{name.replace('_', '-')} {limit:g}"
    if ends is None:
        return [f"{what} is undefined ({_why(figures, what)}), so {option} cannot be met"]
    low, high = ends
    ceiling = name.startswith("max_")
    if high > limit if ceiling else low < limit:
        wide = point <= limit if ceiling else point >= limit
        subject = f"{what} is {point:.3f}, but over {documents} documents it" if wide else what
        end = f"as high as {high:.3f}, above" if ceiling else f"as low as {low:.3f}, below"
        return [f"{subject} may be {end} {option}"]
    few = statistics.too_few(documents)
    if what not in ("cosine", "kl") and few:
        return [f"{option} cannot be said to be met: {few}"]
    return []


def _figure(figures: dict[str, Any], what: str) -> tuple[float, list[float] | None, int]:
    """Return a figure, the ends of its interval, and over how many documents that is."""
    if what == "cosine":
        found = figures["cosine"]
        return found["mean"], found.get("interval"), found.get("documents", 0)
    held = figures["arms"]["mapped"] if what == "kl" else figures
    return held[what], held["intervals"][what], figures["documents"]


def _why(figures: dict[str, Any], what: str) -> str:
    return figures["undefined"].get(what, "nothing measured it")


def enforce(figures: dict[str, Any], gates: Gates) -> None:
    """Stop where a floor is missed.

    Raises:
        FloorMissed: Says all that is missed.
    """
    missed = check(figures, gates)
    if missed:
        raise FloorMissed("; ".join(missed))
