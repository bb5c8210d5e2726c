"""How sure a figure is: bootstrap over documents, exact tests, ratios with their undefined cases.

A figure is carried as samples [1 + R]: row 0 is the estimate on all the data, the rest are
resamples of whole units (documents or conversations), since questions about one document
are not independent. All figures resampled with one seed share their resamples, so their
differences and ratios are paired. Sources: Efron and Tibshirani, An Introduction to the
Bootstrap (1993), ch. 13; Wilson, JASA 22 (1927); McNemar, Psychometrika 12 (1947).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLES = 2000
LEVEL = 0.95
MINIMUM_UNITS = 10
SMALLEST_P = 2 / (RESAMPLES + 1)  # of `bootstrap_p_value`
RESOLUTION = 0.1  # half-width, in accuracy or nats, beyond which "no difference" is not a finding

WILSON_NOTE = "Wilson's score interval, where all or no answers are right; others are bootstrapped"

VERDICTS = (
    "recovers",
    "no better than source",
    "worse than source",
    "content-free",
    "not enough items",
)


@dataclass(frozen=True)
class Interval:
    """An estimate with the ends of its 95 % interval; `point` is None where it is undefined."""

    point: float | None
    lower: float | None = None
    upper: float | None = None

    @property
    def half_width(self) -> float:
        """Half of the interval; infinite where it is undefined."""
        if self.lower is None or self.upper is None:
            return math.inf
        return (self.upper - self.lower) / 2


def ends(found: Interval) -> list[float] | None:
    """Return an interval's ends for JSON; None where it is undefined."""
    return None if found.point is None else [found.lower, found.upper]


def resampled_means(
    values: Tensor, units: Tensor, resamples: int = RESAMPLES, seed: int = 0
) -> Tensor:
    """Return means of values [M, A] over rows, and over rows of resampled units: [1 + R, A] fp64.

    Args:
        values: Rows may be items or tokens; a column with a NaN stays NaN.
        units: [M] the unit each row belongs to; units are drawn, with all their rows.
        resamples: R.
        seed: Equal seeds and equal sets of units draw the same units.
    """
    _, index = units.unique(return_inverse=True)
    count = int(index.max()) + 1
    sums = torch.zeros(count, values.shape[1], dtype=torch.float64).index_add_(
        0, index, values.double()
    )
    sizes = torch.bincount(index, minlength=count).double()
    draws = torch.randint(count, (resamples, count), generator=torch.Generator().manual_seed(seed))
    weights = torch.ones(1 + resamples, count, dtype=torch.float64)
    weights[1:] = torch.zeros(resamples, count, dtype=torch.float64).scatter_add_(
        1, draws, torch.ones(resamples, count, dtype=torch.float64)
    )
    return (weights @ sums) / (weights @ sizes)[:, None]


def interval(samples: Tensor, level: float = LEVEL) -> Interval:
    """Return the percentile interval of samples [1 + R]; resamples without a value are left out."""
    point = samples[0].item()
    known = samples[1:][samples[1:].isfinite()]
    if not math.isfinite(point) or not len(known):
        return Interval(None)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=samples.dtype)
    lower, upper = known.quantile(tails).tolist()
    return Interval(point, lower, upper)


def proportion_interval(samples: Tensor, units: int) -> Interval:
    """Return `interval`, or Wilson's over the units; see `by_wilson`."""
    found = interval(samples)
    if by_wilson(found.point):
        return Interval(found.point, *wilson(round(found.point * units), units))
    return found


def by_wilson(share: float | None) -> bool:
    """Say whether a proportion's interval is Wilson's: all answers are right, or all wrong.

    Every resample is alike then: a bootstrap of twenty right answers out of twenty says 100 %
    for sure; Wilson's score does not.
    """
    return share in (0.0, 1.0)


def wilson(successes: int, trials: int, level: float = LEVEL) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion."""
    z = torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)).item()
    share, spread = successes / trials, z * z / trials
    centre = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / trials + spread / (4 * trials)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_p_value(difference: Tensor) -> float:
    """Return the two-sided p of "no difference" from samples [1 + R] of a paired difference.

    It is never below 2 / (R + 1), `SMALLEST_P` of as many resamples as are usual: where it is
    that, p is not known but for being no larger.
    """
    resamples = difference[1:]
    tail = min((resamples <= 0).sum().item(), (resamples >= 0).sum().item())
    return min(1.0, 2 * (tail + 1) / (len(resamples) + 1))


def mcnemar(first: Tensor, second: Tensor) -> float:
    """Return the exact two-sided p of McNemar's test on paired right/wrong answers [N]."""
    first, second = first.bool(), second.bool()
    only_first, only_second = (first & ~second).sum().item(), (~first & second).sum().item()
    trials, fewer = only_first + only_second, min(only_first, only_second)
    if trials == 0:
        return 1.0
    ways = [
        math.lgamma(trials + 1) - math.lgamma(i + 1) - math.lgamma(trials - i + 1)
        for i in range(fewer + 1)
    ]
    return min(1.0, 2 * sum(math.exp(way - trials * math.log(2)) for way in ways))


def ratio(numerator: Tensor, denominator: Tensor) -> Interval:
    """Return numerator / denominator of samples [1 + R].

    Undefined unless the denominator is above 0 for sure.
    """
    below = interval(denominator)
    if below.lower is None or below.lower <= 0:
        return Interval(None)
    return interval(torch.where(denominator > 0, numerator / denominator, torch.nan))


def retention(mapped: Tensor, native: Tensor, chance: Tensor | float = 0.0) -> Interval:
    """Return the share of the native score that is kept: above `chance`, floor-normalised."""
    return ratio(mapped - chance, native - chance)


def gap_recovered(mapped: Tensor, source: Tensor, native: Tensor) -> Interval:
    """Return (mapped - source) / (native - source) with its sign.

    Undefined where the source is as good as native within the interval: there is no gap.
    """
    return ratio(mapped - source, native - source)


def too_few(units: int) -> str | None:
    """Say that intervals and p over so few documents mean little; None where there are enough."""
    if units >= MINIMUM_UNITS:
        return None
    return f"too few documents for intervals ({units}, at least {MINIMUM_UNITS})"


def why_undefined(divisor: Interval, what: str, absent: str) -> str:
    """Say why a `ratio` is undefined.

    Args:
        divisor: What it divides by.
        what: Its name.
        absent: What is to be said where it is not above 0 within the interval.
    """
    if divisor.point is None or divisor.lower > 0:
        return "an arm has no score"
    if divisor.upper <= 0 or divisor.half_width <= RESOLUTION:
        return absent
    found = f"{divisor.point:.3f} [{divisor.lower:.3f}, {divisor.upper:.3f}]"
    return f"{what} is {found}, not above 0 for sure"


def verdict(over_source: Interval, margin: Interval, telling: Interval, units: int) -> str:
    """Say in one of `VERDICTS` what a map is worth.

    Args:
        over_source: Mapped minus source, in the task's score (higher is better).
        margin: Mapped minus the wrong document's arm.
        telling: Native minus the wrong document's arm: where native itself gains nothing from
            the right document, the items cannot tell a good cache from a bad one.
        units: Documents or conversations behind all three.
    """
    known = None not in (over_source.lower, margin.lower, telling.lower)
    if units < MINIMUM_UNITS or not known or telling.lower <= 0:
        return "not enough items"
    if margin.lower <= 0:
        return (
            "content-free"
            if margin.half_width <= RESOLUTION or margin.point <= 0
            else "not enough items"
        )
    if over_source.lower > 0:
        return "recovers"
    if over_source.upper < 0:
        return "worse than source"
    return "no better than source" if over_source.half_width <= RESOLUTION else "not enough items"


def unsure(over_source: Interval, margin: Interval, telling: Interval, units: int) -> str | None:
    """Say what a verdict of "not enough items" lacks; None for any other. See `verdict`."""
    if verdict(over_source, margin, telling, units) != "not enough items":
        return None
    if units < MINIMUM_UNITS:
        return f"{units} documents, of which a verdict needs at least {MINIMUM_UNITS}"
    if None in (over_source.lower, margin.lower, telling.lower):
        return "an arm has no score"
    if telling.lower <= 0:
        return "native itself gains nothing for sure from the right document"
    what = "margin over wrong_document" if margin.lower <= 0 else "difference from the source"
    return f"the {what} is not known to ±{RESOLUTION:g}"
