"""What makes fitting fast gives what the plain way gives."""

from importlib import import_module

import pytest
import torch
from entries import SOURCE, TARGET, matrix, noise, related

from kvmap import moments
from kvmap.columns import KINDS, groups, head_sizes
from kvmap.fit import Splits, with_assignment
from kvmap.fit.closed_form import RIDGE_GRID, fit_closed_form, solve_best
from kvmap.map_options import MapOptions
from kvmap.moments import Moments
from kvmap.ridge import fitted_error, solve, squared_error

SIZES = head_sizes(SOURCE, TARGET)
GROUPS = groups(SOURCE, TARGET, "all", True)


def accumulated(rows, **options) -> Moments:
    made = Moments(GROUPS, SIZES, **options)
    made.update(rows)
    return made


def dense(rows):
    x, y = (matrix(rows, blocks) for blocks in (GROUPS[0].inputs, GROUPS[0].outputs))
    return x - x.mean(0), y - y.mean(0)


@pytest.mark.parametrize("block", [1, 5, 512])
def test_blocks_above_the_diagonal_make_the_whole_gram_matrix(monkeypatch, block):
    monkeypatch.setattr(moments, "BLOCK", block)
    monkeypatch.setattr(moments, "ROW_CHUNK", 17)
    rows = related(100)
    x, y = dense(rows)
    made = accumulated(rows).covariance(list(GROUPS[0].inputs), list(GROUPS[0].outputs))
    for found, wanted in ((made.gram, x.T @ x), (made.cross, x.T @ y)):
        torch.testing.assert_close(found, torch.from_numpy(wanted), rtol=1e-10, atol=1e-8)
    torch.testing.assert_close(made.gram, made.gram.mT, rtol=1e-12, atol=1e-12)


def test_single_precision_products_cost_digits_but_no_large_mean_cancels():
    rows = noise(400, mean=300.0)
    x, _ = dense(rows)
    found = accumulated(rows, products=torch.float32).tensors["all.gram"]
    error = (found - torch.from_numpy(x.T @ x)).norm() / found.norm()
    assert 0 < error < 1e-5


@pytest.mark.parametrize("unexplained", [0.01, 3.0])
def test_search_from_the_middle_finds_the_best_ridge_of_all(unexplained):
    train, unseen = (
        accumulated(related(n, seed=n, unexplained=unexplained)).covariance(
            list(GROUPS[0].inputs), list(GROUPS[0].outputs)
        )
        for n in (60, 90)
    )
    size = TARGET.head_size
    errors = torch.stack(
        [
            squared_error(unseen, *solve(train, r)).unflatten(0, (-1, size)).sum(-1)
            for r in RIDGE_GRID
        ]
    )
    weight, bias, scores = solve_best(train, unseen, RIDGE_GRID, size)
    wanted = torch.tensor(RIDGE_GRID, dtype=torch.float64)[errors.argmin(0)]
    assert torch.equal(scores["ridge"], wanted)
    total = squared_error(unseen, weight, bias).sum()
    torch.testing.assert_close(total, errors.amin(0).sum(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("ridge", [1e-6, 0.1])
def test_error_on_fitted_rows_needs_no_product_with_the_gram_matrix(ridge):
    made = accumulated(related(80)).covariance(list(GROUPS[0].inputs), list(GROUPS[0].outputs))
    weight, bias = solve(made, ridge)
    torch.testing.assert_close(
        fitted_error(made, weight, ridge), squared_error(made, weight, bias), rtol=1e-7, atol=1e-9
    )


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_layers_fitted_together_are_those_fitted_one_by_one(monkeypatch, heads):
    """And progress is told once for each layer either way."""
    options = with_assignment(MapOptions(heads=heads), SOURCE, TARGET)
    found = groups(SOURCE, TARGET, heads, False)
    splits = [Moments(found, SIZES) for _ in range(2)]
    for made, seed in zip(splits, (1, 2), strict=True):
        made.update(related(90, seed=seed))
    fits = []
    for bound in (1, 1 << 20):
        monkeypatch.setattr(import_module("kvmap.fit.closed_form"), "TOGETHER_BYTES", bound)
        told = []
        fits.append(
            fit_closed_form(
                Splits(*splits, SOURCE, TARGET),
                ((0, 1), (0, 2)),
                options,
                "auto",
                lambda told=told: told.append(1),
            )
        )
        assert len(told) == 2
    for mine, theirs in zip(fits[0][0], fits[1][0], strict=True):
        for kind in KINDS:
            torch.testing.assert_close(mine.of(kind).weight, theirs.of(kind).weight)
            torch.testing.assert_close(mine.of(kind).bias, theirs.of(kind).bias)
    for name in ("train", "held_out"):
        for kind in KINDS:
            one, other = (getattr(scores, name)[kind] for _, scores in fits)
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
