"""What quality costs: which candidates are worth having, and which a budget picks."""

import dataclasses

import pytest
from entries import SOURCE, TARGET

from kvmap import fit, pipeline
from kvmap.cli import fit_text
from kvmap.errors import UsageError
from kvmap.fit import frontier
from kvmap.fit.frontier import Point, candidates, marked, within

POINTS = [
    Point(fit.recipe("kvmap"), parameters=10 * n, cost=cost, milliseconds=9 * cost, divergence=kl)
    for n, (cost, kl) in enumerate([(0.3, 0.1), (0.1, 0.5), (0.2, 0.6), (0.4, 0.1)])
]


def test_a_point_is_on_the_frontier_where_no_cheaper_one_is_as_good():
    found = [(point.cost, point.best) for point in marked(POINTS)]
    assert found == [(0.1, True), (0.2, False), (0.3, True), (0.4, False)]


@pytest.mark.parametrize(("budget", "cost"), [(0.1, 0.1), (0.25, 0.1), (0.3, 0.3), (9, 0.3)])
def test_a_budget_picks_the_best_it_can_pay(budget, cost):
    assert within(POINTS, budget).cost == cost
    assert within(POINTS, 9 * budget, "ms").cost == cost


def test_a_budget_too_small_is_refused():
    with pytest.raises(UsageError, match=r"at most 0\.05 of a prefill's work; .* takes 0\.1"):
        within(POINTS, 0.05)
    with pytest.raises(UsageError, match=r"no map costs at most 0\.05 ms; .* takes 0\.9"):
        within(POINTS, 0.05, "ms")


@pytest.mark.parametrize(
    ("kept", "read"), [((0,), {(0,)}), ((2,), {(2,)}), ((1, 2), {(1,), (1, 2)})]
)
def test_candidates_read_layers_of_the_tokens_before_that_are_kept(kept, read):
    found = [one.options for one in candidates(fit.recipe("kvmap"), (SOURCE, TARGET), kept)]
    assert {options.lookback_layers for options in found if options.lookback} == read


def test_candidates_are_measured_on_the_pair(pair, calibration, monkeypatch):
    """All heads cost most; without an exact answer in reach nothing is perfect or useless."""
    found = calibration("noisy_image")
    options = dataclasses.replace(fit.recipe("kvmap").options, tail_share=0.25)
    recipe = dataclasses.replace(fit.recipe("kvmap"), ridge=1e-4, options=options)
    openers = tuple(lambda model=model: model for model in pair("noisy_image"))
    fits, told, solve = [], [], frontier.fit_closed_form
    monkeypatch.setattr(
        frontier, "fit_closed_form", lambda *given: fits.append(given[1:3]) or solve(*given)
    )
    points = pipeline.cost_quality(
        found, recipe, lambda *_: None, openers, lambda *one: told.append(one)
    )
    assert len(set(fits)) == len(fits)  # maps of several ranks are one fit's
    assert [done for _, done, _ in told] == list(range(1, told[0][2] + 1))
    assert sum(len(one) for one, _, _ in told) == len(points)
    assert {point.recipe.options.heads for point in points} == {"all", "matched"}
    assert points == sorted(points, key=lambda point: (point.cost, point.divergence))
    assert all(0 <= point.divergence < 1 for point in points)
    dearest = points[-1].recipe
    assert (dearest.options.joint, dearest.options.lookback, dearest.k) == (True, 3, 3)
    assert dearest.options.lookback_layers == found.scope.lookback_layers
    assert points[0].best
    assert all(point.milliseconds > 0 for point in points)
    short, long = (
        [p.cost for p in points if (p.recipe.options.native_tail > 1) is longer]
        for longer in (False, True)
    )
    assert len(short) == len(long)
    assert all(a < b for a, b in zip(short, long, strict=True))


def test_a_line_says_what_came_of_a_candidate():
    recipe = dataclasses.replace(fit.recipe("kvmap"), k=2, rank=0.1)
    options = dataclasses.replace(recipe.options, lookback_layers=(0, 4), native_tail=25)
    short = dataclasses.replace(options, native_tail=1)
    points = [
        Point(dataclasses.replace(recipe, options=one), 10, 0.1, ms, kl)
        for one, ms, kl in ((short, 2.14, 0.5), (options, 9.0, 0.25))
    ]
    assert fit_text.candidate(points, 3, 12) == (
        "3 of 12: all heads, joint, anchor, lookback 3 of layers 0,4, k 2, rank +10% error: "
        "KL 0.500, 2.1 ms with a tail of 1, KL 0.250, 9.0 ms with a tail of 25"
    )
