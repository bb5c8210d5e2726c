"""From scores to figures: arms, ratios, margins, tests and the verdict, as plain JSON data.

The score a verdict rests on is accuracy where answers can be right or wrong, else minus the
nats per token. Several tasks count alike: each is resampled by itself and the resamples are
averaged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvmap import metrics
from kvmap.evaluate import drift, grid, statistics
from kvmap.evaluate.arms import CONTROLS
from kvmap.evaluate.scores import Scores, has_accuracy
from kvmap.evaluate.statistics import Interval, ends

MEASURES = ("accuracy", "nll", "kl", "top1")


def summarise(scores: Scores, seed: int = 0) -> dict[str, Any]:
    """Return a task's figures with intervals."""
    samples = resample(scores, seed)
    figures = _figures(samples, scores.chance, scores.documents, score_of([scores]))
    _add_exact(figures, scores)
    return figures | {
        "chance": scores.chance,
        "by": _groups(scores),
        "grid": grid.grid(scores),
        "drift": drift.drift(scores, seed),
    }


def summarise_all(parts: Sequence[Scores], seed: int = 0) -> dict[str, Any]:
    """Return the figures over all tasks, and each task's under "tasks"."""
    score = score_of(parts)
    counted = [part for part in parts if score == "nll" or has_accuracy(part)]
    samples = _average([resample(part, seed + i) for i, part in enumerate(parts)])
    chances = [part.chance for part in counted if part.chance is not None]
    chance = sum(chances) / len(chances) if chances else None
    documents = sum(part.documents for part in counted)
    figures = _figures(samples, chance, documents, score)
    if len(parts) == 1:
        _add_exact(figures, parts[0])
    figures["n"] = sum(len(part.labels) for part in counted)
    figures["chance"] = chance
    return figures | {"tasks": {part.task: summarise(part, seed) for part in parts}}


def score_of(parts: Sequence[Scores]) -> str:
    """Return which measure the verdict rests on."""
    return "accuracy" if any(map(has_accuracy, parts)) else "nll"


Samples = dict[tuple[str, str], Tensor]


def resample(scores: Scores, seed: int = 0) -> Samples:
    """Return by (measure, arm) the samples [1 + R]; all share their draws of documents."""
    made = {}
    for measure in MEASURES:
        values = getattr(scores, measure)
        units = scores.units if measure == "accuracy" else scores.token_units
        if len(values) == 0:
            means = torch.full((1 + statistics.RESAMPLES, len(scores.arms)), torch.nan)
        else:
            means = statistics.resampled_means(values, units, seed=seed)
        made |= {(measure, arm): means[:, i] for i, arm in enumerate(scores.arms)}
    return made


def _average(parts: Sequence[Samples]) -> Samples:
    """Average the tasks that have a measure; an arm that is NaN in one of them stays so."""
    averaged = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        parts_with = [part for part in parts if key in part]
        have = [part[key] for part in parts_with if part[key[0], "native"][0].isfinite()]
        averaged[key] = torch.stack(have or [parts_with[0][key]]).mean(0)
    return averaged


def _figures(samples: Samples, chance: float | None, documents: int, score: str) -> dict[str, Any]:
    arms = list(dict.fromkeys(arm for _, arm in samples))
    sign = 1.0 if score == "accuracy" else -1.0
    value = {arm: sign * samples[score, arm] for arm in arms}
    intervals = _ratios(samples, value, chance, score)
    control, intervals["margin"] = best_control(value)
    over_source = statistics.interval(value["mapped"] - value["source"])
    wrong = statistics.interval(value["mapped"] - value["wrong_document"])
    telling = statistics.interval(value["native"] - value["wrong_document"])
    intervals["margin_wrong_document"] = wrong
    return {
        "arms": {arm: _arm(samples, arm, documents) for arm in arms},
        **{name: found.point for name, found in intervals.items()},
        "margin_control": control,
        "intervals": {name: ends(found) for name, found in intervals.items()},
        "tests": {
            f"mapped_{other}": _test(value["mapped"] - value[other], documents)
            for other in ("source", "native", "wrong_document")
        },
        "documents": documents,
        "score": score,
        "verdict": statistics.verdict(over_source, wrong, telling, documents),
        "unsure": statistics.unsure(over_source, wrong, telling, documents),
        "undefined": _undefined(samples, value, chance, score, intervals) | _untested(documents),
    }


def _ratios(
    samples: Samples, value: dict[str, Tensor], chance: float | None, score: str
) -> dict[str, Interval]:
    """Return retention (accuracy only), floor-normalised retention and the gap recovered."""
    none = Interval(None)
    mapped, source, native = value["mapped"], value["source"], value["native"]
    right = score == "accuracy"
    nll = {arm: -samples["nll", arm] for arm in ("mapped", "source", "native")}
    return {
        "retention": statistics.retention(mapped, native) if right else none,
        "floor_normalised_retention": (
            statistics.retention(mapped, native, chance) if right and chance is not None else none
        ),
        "gap_recovered": statistics.gap_recovered(mapped, source, native),
        "gap_recovered_nll": statistics.gap_recovered(nll["mapped"], nll["source"], nll["native"]),
    }


def best_control(value: dict[str, Tensor]) -> tuple[str | None, Interval]:
    """Return the best control and the margin of mapped over it."""
    known = [arm for arm in CONTROLS if arm in value and value[arm][0].isfinite()]
    if not known:
        return None, Interval(None)
    best = max(known, key=lambda arm: value[arm][0].item())
    return best, statistics.interval(value["mapped"] - value[best])


def _arm(samples: Samples, arm: str, documents: int) -> dict[str, Any]:
    found = {name: statistics.interval(samples[name, arm]) for name in ("nll", "kl", "top1")}
    right = samples["accuracy", arm]
    found["accuracy"] = statistics.proportion_interval(right, documents)
    ordered = {name: found[name] for name in MEASURES}
    return {name: part.point for name, part in ordered.items()} | {
        "intervals": {name: ends(part) for name, part in ordered.items()}
    }


def _test(difference: Tensor, documents: int) -> dict[str, Any]:
    found = statistics.interval(difference)
    known = found.point is not None and not statistics.too_few(documents)
    p = statistics.bootstrap_p_value(difference) if known else None
    return {"difference": found.point, "interval": ends(found), "p_bootstrap": p}


def _untested(documents: int) -> dict[str, str]:
    """Say why no p is given, where none is."""
    few = statistics.too_few(documents)
    return {"p_bootstrap": few} if few else {}


def _undefined(
    samples: Samples,
    value: dict[str, Tensor],
    chance: float | None,
    score: str,
    intervals: dict[str, Interval],
) -> dict[str, str]:
    """Say of each ratio that is undefined why it is; see `_ratios`."""
    nats = samples["nll", "source"] - samples["nll", "native"]
    no_gap = "the source is as good as native or better, within the interval: there is no gap"
    divided = {
        "gap_recovered": (value["native"] - value["source"], "native - source", no_gap),
        "gap_recovered_nll": (nats, "source - native in nats", no_gap),
        "retention": (value["native"], "native", "native scores nothing to retain"),
        "floor_normalised_retention": (
            value["native"] - (chance or 0.0),
            "native - chance",
            "native is no better than chance",
        ),
    }
    reasons = {
        name: statistics.why_undefined(statistics.interval(divisor), what, absent)
        for name, (divisor, what, absent) in divided.items()
    }
    if chance is None:
        reasons["floor_normalised_retention"] = "chance is not known"
    if score != "accuracy":
        none_right = "nothing can be right or wrong here"
        reasons |= dict.fromkeys(("retention", "floor_normalised_retention"), none_right)
    return {name: why for name, why in reasons.items() if intervals[name].point is None}


def _add_exact(figures: dict[str, Any], scores: Scores) -> None:
    """Add what needs the items themselves: n, McNemar's p, the 95th percentile of divergence."""
    figures["n"] = len(scores.labels)
    figures["tokens"] = len(scores.nll)
    mapped = scores.column("accuracy", "mapped")
    few = statistics.too_few(figures["documents"])
    binary = bool(((mapped == 0) | (mapped == 1)).all()) and len(mapped) > 0
    for other in ("source", "native", "wrong_document"):
        theirs = scores.column("accuracy", other)
        exact = statistics.mcnemar(mapped, theirs) if binary and not few else None
        figures["tests"][f"mapped_{other}"]["p_mcnemar"] = exact
    if binary and few:
        figures["undefined"]["p_mcnemar"] = few
    for arm, found in figures["arms"].items():
        kl = scores.column("kl", arm)
        known = len(kl) > 0 and not math.isnan(kl[0].item())
        found["kl_p95"] = metrics.mean_and_p95(kl)[1] if known else None


def _groups(scores: Scores) -> dict[str, dict[str, Any]]:
    """Return accuracy, nats and n by each label that varies, as the grouped tables show them."""
    names = sorted({name for labels in scores.labels for name in labels})
    tables = {}
    for name in names:
        values = {labels[name] for labels in scores.labels if name in labels}
        if len(values) > 1:
            ordered = sorted(values, key=lambda v: (isinstance(v, str), v))
            tables[name] = {str(v): _group(scores, name, v) for v in ordered}
    return tables


def _group(scores: Scores, name: str, value: Any) -> dict[str, Any]:
    part = scores.where(lambda labels: labels.get(name) == value)
    samples = resample(part)
    right = score_of([part]) == "accuracy"
    keyed = {arm: samples["accuracy" if right else "nll", arm] for arm in part.arms}
    sign = 1.0 if right else -1.0
    gap = statistics.gap_recovered(*(sign * keyed[a] for a in ("mapped", "source", "native")))
    measure = "accuracy" if right else "nll"
    return {
        "n": len(part.labels),
        "arms": {arm: {measure: _number(samples_[0])} for arm, samples_ in keyed.items()},
        "gap_recovered": gap.point,
        "intervals": {"gap_recovered": ends(gap)},
    }


def _number(value: Tensor) -> float | None:
    found = value.item()
    return found if math.isfinite(found) else None
