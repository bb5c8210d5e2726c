"""Floors that stop a pipeline. Each compares the end of an interval that flatters least."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from kvmap.errors import FloorMissed


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
    """Return what is missed, one sentence part each; empty where all is well.

    A map whose content does not matter fails whatever is asked. With too few items, no floor
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
    low, high = _interval(figures, what) or (None, None)
    option = f"--{name.replace('_', '-')} {limit:g}"
    if low is None:
        return [f"{what} is undefined ({_why(figures, what)}), so {option} cannot be met"]
    if what not in ("cosine", "kl") and figures["verdict"] == "not enough items":
        return [f"{figures['documents']} documents are not enough to say that {option} is met"]
    if name.startswith("max_"):
        return [f"{what} may be as high as {high:.3f}, above {option}"] if high > limit else []
    return [f"{what} may be as low as {low:.3f}, below {option}"] if low < limit else []


def _interval(figures: dict[str, Any], what: str) -> list[float] | None:
    if what == "cosine":
        return figures["cosine"].get("interval")
    if what == "kl":
        return figures["arms"]["mapped"]["intervals"]["kl"]
    return figures["intervals"][what]


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
