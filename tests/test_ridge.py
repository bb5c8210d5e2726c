"""Ridge regression from moments is ridge regression on the rows."""

import numpy as np
import oracles
import pytest
import torch

from kvmap.ridge import Covariance, r2, solve, squared_error


def covariance(x: np.ndarray, y: np.ndarray) -> Covariance:
    gram, cross = oracles.covariance(x, y)
    arrays = (x.mean(0), y.mean(0), gram, cross, ((y - y.mean(0)) ** 2).sum(0))
    return Covariance(float(len(x)), *(torch.from_numpy(array) for array in arrays))


def problem(rows: int = 400, inputs: int = 12, outputs: int = 6, seed: int = 0):
    """Correlated inputs with large means, and outputs linear in them but for noise."""
    generator = np.random.default_rng(seed)
    mixing = np.random.default_rng(7).normal(size=(inputs, inputs))
    weight = np.random.default_rng(8).normal(size=(inputs, outputs))
    x = generator.normal(size=(rows, inputs)) @ mixing + 20
    return x, x @ weight - 5 + generator.normal(size=(rows, outputs))


def predictions(x: np.ndarray, solution) -> np.ndarray:
    weight, bias = solution
    return x @ weight.numpy() + bias.numpy()


@pytest.mark.parametrize("ridge", [1e-6, 1e-3, 1e-2, 1e-1, 1.0])
def test_solution_is_the_penalised_least_squares_of_the_rows(ridge):
    x, y = problem()
    weight, bias = solve(covariance(x, y), ridge)
    expected_weight, expected_bias = oracles.ridge(x, y, ridge)
    np.testing.assert_allclose(weight.numpy(), expected_weight, atol=1e-9)
    np.testing.assert_allclose(bias.numpy(), expected_bias, atol=1e-7)


@pytest.mark.parametrize("ridge", [0.0, 1e-12])
def test_as_ridge_vanishes_it_is_lstsq(ridge):
    """`torch.linalg.lstsq` on rows with a column of ones."""
    x, y = problem()
    ones = torch.from_numpy(np.column_stack((x, np.ones(len(x)))))
    expected = torch.linalg.lstsq(ones, torch.from_numpy(y)).solution.numpy()
    weight, bias = solve(covariance(x, y), ridge)
    np.testing.assert_allclose(weight.numpy(), expected[:-1], atol=1e-8)
    np.testing.assert_allclose(bias.numpy(), expected[-1], atol=1e-6)


def test_ridge_is_relative_to_scale_and_rows():
    """The same number shrinks equally whatever the inputs' unit and however often they repeat."""
    x, y = problem()
    expected = predictions(x, solve(covariance(x, y), 0.1))
    scaled = predictions(1000 * x, solve(covariance(1000 * x, y), 0.1))
    np.testing.assert_allclose(scaled, expected, atol=1e-7)
    twice = predictions(x, solve(covariance(np.tile(x, (5, 1)), np.tile(y, (5, 1))), 0.1))
    np.testing.assert_allclose(twice, expected, atol=1e-7)


def test_bias_is_not_penalised():
    x, y = problem()
    weight, bias = solve(covariance(x, y), 0.5)
    moved_weight, moved_bias = solve(covariance(x + 3, y + 100), 0.5)
    np.testing.assert_allclose(moved_weight.numpy(), weight.numpy(), atol=1e-9)
    np.testing.assert_allclose(
        predictions(x + 3, (moved_weight, moved_bias)), predictions(x, (weight, bias)) + 100
    )


def test_channels_of_very_different_size_are_all_fitted():
    """Outlier channels: eight orders of magnitude apart, sixteen in the Gram matrix."""
    x, y = problem()
    scaled = x * 10.0 ** np.linspace(-4, 4, x.shape[1])
    found = predictions(scaled, solve(covariance(scaled, y), 0.0))
    np.testing.assert_allclose(found, predictions(x, solve(covariance(x, y), 0.0)), atol=1e-5)


@pytest.mark.parametrize("ridge", [0.0, 1e-14, 1e-6])
def test_repeated_and_constant_inputs_do_no_harm(ridge):
    """A singular Gram matrix: predictions are those of the inputs that are left."""
    x, y = problem()
    singular = np.column_stack((x, x[:, :4], x[:, 0] - 2 * x[:, 1], np.full(len(x), 7.0)))
    solution = solve(covariance(singular, y), ridge)
    assert all(torch.isfinite(part).all() for part in solution)
    expected = predictions(x, solve(covariance(x, y), 0.0))
    found = predictions(singular, solution)
    assert np.abs(found - expected).max() < (1e-5 if ridge < 1e-10 else 1e-2)


def test_fewer_rows_than_inputs_interpolate():
    x, y = problem(rows=20, inputs=40)
    found = predictions(x, solve(covariance(x, y), 0.0))
    np.testing.assert_allclose(found, y, atol=1e-5)


def test_near_duplicates_do_not_explode():
    """Inputs equal to eight digits: weights must not be their rounding error, magnified."""
    x, y = problem()
    close = np.column_stack((x, x + 1e-8 * np.random.default_rng(1).normal(size=x.shape)))
    unseen_x, unseen_y = problem(seed=1)
    unseen = np.column_stack((unseen_x, unseen_x))
    for ridge in (0.0, 1e-8, 1e-4):
        found = predictions(unseen, solve(covariance(close, y), ridge))
        assert oracles.r2(unseen_y, found) > 0.95


@pytest.mark.parametrize("seed", range(8))
def test_inputs_equal_to_rounding_get_no_weight_of_rounding(seed):
    """Their Gram matrix may factor by luck, with a pivot that is nothing but rounding."""
    x, y = problem()
    close = np.column_stack((x, x * (1 + 1e-8 * np.random.default_rng(seed).normal(size=x.shape))))
    weight, _ = solve(covariance(close, y), 0.0)
    assert weight.abs().max() < 100


@pytest.mark.parametrize("seed", [0, 1])
def test_error_from_moments_is_the_error_on_the_rows(seed):
    """Seed 1 is held out: other rows, other means, negative R² included."""
    solution = solve(covariance(*problem(rows=30)), 1e-3)
    x, y = problem(seed=seed)
    y = y + (5 if seed else 0)
    residual = ((y - predictions(x, solution)) ** 2).sum(0)
    np.testing.assert_allclose(
        squared_error(covariance(x, y), *solution).numpy(), residual, rtol=1e-8
    )
    found = r2(covariance(x, y), *solution, head_size=3)
    expected = [
        oracles.r2(y[:, head], predictions(x, solution)[:, head])
        for head in (slice(3), slice(3, 6))
    ]
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-9)


def test_pure_noise_predicts_nothing_unseen():
    """In-sample R² is p/n however little there is to learn."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(300, 100)), generator.normal(size=(300, 8))
    solution = solve(covariance(x, y), 1e-6)
    assert float(r2(covariance(x, y), *solution, head_size=8)) == pytest.approx(1 / 3, abs=0.05)
    unseen = covariance(generator.normal(size=(300, 100)), generator.normal(size=(300, 8)))
    assert float(r2(unseen, *solution, head_size=8)) < -0.1


def test_head_without_variance_scores_zero():
    x, y = problem()
    y[:, 3:] = 4.0
    found = r2(covariance(x, y), *solve(covariance(x, y), 1e-3), head_size=3)
    assert found[0] > 0.9
    assert found[1] == 0


def test_several_regressions_at_a_time_give_what_each_gives_alone():
    """One of them has a null space, which is left out of it alone."""
    problems = [problem(rows=60, inputs=6, seed=seed) for seed in range(3)]
    x, y = problems[1]
    problems[1] = np.concatenate((x[:, :3], x[:, :3]), axis=1), y
    several = [covariance(*each) for each in problems]
    stacked = Covariance.stacked(several)
    weight, bias = solve(stacked, 0.0)
    errors, shares = squared_error(stacked, weight, bias), r2(stacked, weight, bias, head_size=3)
    for at, one in enumerate(several):
        alone = solve(one, 0.0)
        torch.testing.assert_close((weight[at], bias[at]), alone, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(errors[at], squared_error(one, *alone), rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(shares[at], r2(one, *alone, head_size=3), rtol=1e-7, atol=1e-9)
