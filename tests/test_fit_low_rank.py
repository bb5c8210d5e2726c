"""Weights in two factors: against a plain SVD, and against the rows themselves."""

import dataclasses

import pytest
import torch
from conftest import token_ids

from kvmap import fit, pipeline
from kvmap.fit.job import splits
from kvmap.fit.low_rank import Basis, reduce_rank
from kvmap.map_options import MapOptions
from kvmap.mapping import Affine, CacheMap
from kvmap.models import prefill
from kvmap.ridge import Covariance, solve, squared_error

HEAD = 2


def regression(n, seed):
    """Draw rows with large means whose outputs are of very different size; return moments."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    truth = torch.Generator().manual_seed(7)
    mixing = torch.randn(9, 6, generator=truth, dtype=torch.float64)
    x = draw(n, 9) * torch.arange(1, 10) + 30
    y = x @ mixing * torch.tensor([1, 1, 50, 50, 0.02, 0.02]).double() + draw(n, 6)
    return x, y


def moments(x, y):
    dx, dy = x - x.mean(0), y - y.mean(0)
    return Covariance(len(x), x.mean(0), y.mean(0), dx.T @ dx, dx.T @ dy, dy.square().sum(0))


@pytest.mark.parametrize("rank", [1, 3])
def test_no_other_map_of_that_rank_is_nearer(rank):
    """Against an SVD of C^½WS⁻¹, whose tail is the least error there is, and bias included."""
    x, y = regression(60, rank)
    found = moments(x, y)
    weight, bias = solve(found, 1e-6)
    basis = Basis.of(weight[None], [found], HEAD)
    (made,) = basis.factored([Affine(weight[None], bias[None])], rank)
    assert (made.weight.shape, made.up.shape) == ((1, 9, rank), (1, rank, 6))
    error = (x @ weight + bias - made(x[None])[0]) / basis.spread[0]
    centred = (x - x.mean(0)) @ weight / basis.spread[0]
    tail = torch.linalg.svdvals(centred)[rank:]
    torch.testing.assert_close(error.square().sum(), tail.square().sum())


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 5.0])
def test_the_rank_chosen_is_the_least_that_keeps_the_held_out_error(share):
    """Against the error of every rank, computed from held-out rows one after the other."""
    found, (x, y) = moments(*regression(400, 1)), regression(50, 2)
    weight, bias = solve(found, 1e-6)
    basis = Basis.of(weight[None], [found], HEAD)

    def error(rank):
        down = weight / basis.spread[0] @ basis.directions[0][:, -rank:]
        made = down @ basis.directions[0][:, -rank:].T * basis.spread[0]
        shift = found.output_mean - found.input_mean @ made
        return float(((y - x @ made - shift) / basis.spread[0]).square().sum())

    errors = [error(rank) for rank in range(1, 7)]
    wanted = next(r for r, e in enumerate(errors, 1) if e <= (1 + share) * errors[-1] * (1 + 1e-9))
    assert basis.least_rank([moments(x, y)], share) == wanted
    unseen = moments(x, y)
    assert errors[-1] == pytest.approx(
        float((squared_error(unseen, weight, bias) / basis.spread[0].square()).sum())
    )


@pytest.mark.parametrize("heads", ["all", "matched"])
@pytest.mark.parametrize("joint", [False, True])
def test_a_map_of_low_rank_is_smaller_saved_loaded_and_applied(
    pair, calibration, tmp_path, heads, joint
):
    models, found = pair("image"), calibration("image")
    openers = tuple(lambda model=model: model for model in models)
    layers = tuple((at,) for at in (0, 1, 1, 2))
    recipe = fit.Recipe(1, 1e-6, MapOptions(heads=heads, joint=joint))
    whole = pipeline.fit_map(found, layers, recipe, lambda *_: None, openers).cmap
    data = splits(found, 0)
    small = reduce_rank(whole, data, 4)
    assert small.parameters < 0.8 * whole.parameters
    assert all(layer.shared == joint for layer in small.layers)
    assert reduce_rank(whole, data, 64).parameters == whole.parameters
    again = CacheMap.load(small.save(tmp_path / "small"))
    assert (again.parameters, again.layers[0].shared) == (small.parameters, joint)
    cache = prefill(models[0], token_ids(2, 12, 3))[0]
    whole_again = small.each(lambda _, part: Affine(part.weight @ part.up, part.bias))
    for made, wanted in zip(again.apply(cache).keys, whole_again.apply(cache).keys, strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)


def test_a_twin_keeps_its_whole_rank(pair, calibration):
    """Where nothing is left unexplained, no share of it allows a lower rank."""
    found = calibration("twin_llama")
    recipe = dataclasses.replace(fit.recipe("kvmap-fast"), k=3)
    layers = ((0, 1, 2),) * found.target.geometry.layers
    made = pipeline.fit_map(found, layers, recipe, lambda *_: None).cmap
    assert all(layer.key.up is None for layer in made.layers if layer)
