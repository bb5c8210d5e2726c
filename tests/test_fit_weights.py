"""Row weights: the formula written out token by token, and what weighting means."""

import math

import pytest
import torch
from conftest import token_ids

from kvmap import fit, pipeline
from kvmap.collect import collect
from kvmap.collect_options import CollectOptions
from kvmap.errors import UsageError
from kvmap.fit import weights
from kvmap.fit.job import splits
from kvmap.ridge import Covariance, solve


def naive_reads(query, key, value, scaling, boundary):
    """Return r_K and r_V of one boundary for one KV head; query [group, T, D], key [T, D]."""
    size = key.shape[1]
    read_key, read_value = torch.zeros(key.shape[0]), torch.zeros(key.shape[0])
    for head in query:
        asked = head[boundary]
        scores = [float(asked @ key[u]) * scaling for u in range(boundary + 1)]
        total = sum(math.exp(s) for s in scores)
        attention = [math.exp(s) / total for s in scores]
        output = sum(a * value[u] for u, a in enumerate(attention))
        for u in range(boundary):
            squared = attention[u] ** 2
            read_value[u] += squared
            distance = float((value[u] - output).square().sum())
            read_key[u] += squared * distance * float(asked.square().sum()) / size
    return read_key, read_value


@pytest.mark.parametrize(("group", "scaling"), [(1, 0.5), (3, 0.25)])
def test_reads_follow_the_formula(group, scaling):
    generator = torch.Generator().manual_seed(group)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    query, key, value = draw(2, 2 * group, 9, 4), draw(2, 2, 9, 4), draw(2, 2, 9, 4)
    at = torch.tensor([1, 3, 8])
    found = weights.row_reads(query, key, value, scaling, at)
    for batch in range(2):
        for head in range(2):
            asked = query[batch, head * group : (head + 1) * group]
            expected = [torch.zeros(9), torch.zeros(9)]
            for boundary in at.tolist():
                reads = naive_reads(asked, key[batch, head], value[batch, head], scaling, boundary)
                for total, read in zip(expected, reads, strict=True):
                    total += read / read.sum()
            for made, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(made[batch, head], wanted, rtol=1e-4, atol=1e-6)


def test_boundaries_are_spread_in_their_logarithm():
    at = weights.boundaries(1024)
    assert (at[0], at[-1]) == (1, 1023)
    assert len(at) <= weights.BOUNDARIES
    assert (at.diff() > 0).all()
    gaps = at[at > 20].double().log().diff()
    assert gaps.max() < 1.3 * gaps.min()


@pytest.mark.parametrize("inputs", [1, 20, 45, 500])
def test_shrinking_keeps_mean_one_and_enough_effective_rows(inputs):
    raw = torch.rand(100, generator=torch.Generator().manual_seed(3)) ** 4
    made = weights.shrunk(raw, inputs)
    assert float(made.mean()) == pytest.approx(1)
    effective = float(made.sum() ** 2 / made.square().sum())
    raw_size = float(raw.sum() ** 2 / raw.square().sum())
    assert effective == pytest.approx(min(max(raw_size, 2 * inputs), 100), rel=1e-6)


def test_a_row_of_weight_two_is_a_row_seen_twice():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64) + 3
    y = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    weight = torch.ones(30, dtype=torch.float64)
    weight[:10] = 2
    twice = weights.weighted_moments(
        torch.cat((x, x[:10])), torch.cat((y, y[:10])), torch.ones(40, dtype=torch.float64)
    )
    once = weights.weighted_moments(x, y, weight)
    for name, tensor in twice.items():
        torch.testing.assert_close(once[name], tensor)
    as_covariance = [Covariance(m["count"].item(), *list(m.values())[1:]) for m in (once, twice)]
    for a, b in zip(*(solve(c, 1e-3) for c in as_covariance), strict=True):
        torch.testing.assert_close(a, b)


def collected(pair, folder, dump):
    openers = tuple(lambda model=model: model for model in pair("noisy_image"))
    options = CollectOptions(stride=2, heads="all", joint=True, dump=dump, shard=8)
    return collect(openers, token_ids(16, 48, 3), folder, options, {}), openers


def test_weights_change_the_fit_and_equal_weights_do_not(pair, tmp_path):
    calibration, openers = collected(pair, tmp_path / "calibration", dump=True)
    recipe = fit.recipe("cachebridge")
    options = fit.with_assignment(
        recipe.options, calibration.source.geometry, calibration.target.geometry
    )
    data = splits(calibration, options.native_head)
    layers = tuple((at % 3,) for at in range(4))
    ids = calibration.sequences["token_ids"].long()
    reads = weights.attention_weights(openers[1](), ids, 2)
    assert reads["key", 0].shape == (16, 24, 4)
    plain = fit.fit_closed_form(data, layers, options, 1e-2)[0]
    made = {
        "as read": reads,
        "alike": {name: torch.ones_like(table) for name, table in reads.items()},
    }
    for name, table in made.items():
        read = weights.weighted_splits(calibration, data, table, layers, options)
        found = fit.fit_closed_form(read, layers, options, 1e-2)[0]
        gap = max(
            float((a.of(kind).weight - b.of(kind).weight).abs().max())
            for a, b in zip(found, plain, strict=True)
            for kind in ("key", "value")
        )
        assert (gap < 1e-5) == (name == "alike")


def test_weights_need_the_rows(pair, tmp_path):
    calibration, openers = collected(pair, tmp_path / "calibration", dump=False)
    layers = tuple((0,) for _ in range(4))
    with pytest.raises(UsageError, match=r"row weights need the rows.*--no-dump"):
        pipeline.fit_map(calibration, layers, fit.recipe("cachebridge"), lambda *_: None, openers)


@pytest.mark.parametrize("side", ["source", "target"])
def test_models_other_than_the_calibrations_are_refused(calibration, loaded, side):
    made = calibration("noisy_image")
    job = fit.Job(made, (), fit.recipe("kvmap"), (lambda: loaded("qwen3_small"),) * 2, None)
    said = rf"calibration: its {side} is .*, found .*qwen3_small .*; run `kvmap collect` for this m"
    with pytest.raises(UsageError, match=said):
        job.open(("source", "target").index(side))
