"""Statistics against closed forms, tables and constructed data."""

import math

import pytest
import torch

from kvmap.evaluate import statistics as st


def test_first_row_is_the_mean_and_rows_are_weighted_by_their_number():
    """Unit 0 has one row, unit 1 three: the mean is over rows, not over units."""
    values = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    samples = st.resampled_means(values, torch.tensor([7, 3, 3, 3]), resamples=200, seed=1)
    assert samples.shape == (201, 1)
    assert samples[0].item() == 0.25
    assert set(samples[1:, 0].tolist()) == {0.0, 0.25, 1.0}


def test_bootstrap_of_units_matches_the_standard_error_of_unit_means():
    """Ten equal answers per document carry the information of one: the error is 1/sqrt(units)."""
    generator = torch.Generator().manual_seed(0)
    document = torch.randn(200, 1, generator=generator)
    units = torch.arange(200).repeat_interleave(10)
    found = st.interval(st.resampled_means(document.repeat_interleave(10, 0), units)[:, 0])
    expected = 1.96 * document.std().item() / math.sqrt(200)
    assert found.half_width == pytest.approx(expected, rel=0.1)


def test_bootstrap_is_seeded_and_paired():
    values = torch.rand(30, 1).repeat(1, 2)
    units = torch.arange(30)
    first, second = (st.resampled_means(values, units, seed=5) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first[:, 0], first[:, 1])
    assert not torch.equal(first, st.resampled_means(values, units, seed=6))


def test_missing_column_stays_missing():
    values = torch.tensor([[1.0, torch.nan], [0.0, torch.nan]])
    samples = st.resampled_means(values, torch.arange(2))
    assert st.interval(samples[:, 0]).point == 0.5
    assert st.interval(samples[:, 1]) == st.Interval(None)


def test_wilson_matches_published_values():
    """Newcombe, Statistics in Medicine 17 (1998), table I: 81/263, 15/148, 0/20, 1/29."""
    assert st.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert st.wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert st.wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert st.wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=1e-4)


def test_perfect_score_is_not_certain():
    samples = st.resampled_means(torch.ones(40, 1), torch.arange(20).repeat(2))[:, 0]
    found = st.proportion_interval(samples, 20)
    assert (found.point, found.upper) == (1, 1)
    assert found.lower == pytest.approx(1 - 0.1611, abs=1e-4)
    assert [st.by_wilson(share) for share in (0.0, 1.0, 0.5, None)] == [True, True, False, False]


def test_mcnemar_is_the_exact_binomial():
    """8 against 1 discordant pairs: p = 2 * (1 + 9) / 2**9; concordant pairs do not count."""
    first = torch.tensor([True] * 8 + [False] * 1 + [True] * 50)
    second = torch.tensor([False] * 8 + [True] * 1 + [True] * 50)
    assert st.mcnemar(first, second) == pytest.approx(20 / 512)
    assert st.mcnemar(second, first) == pytest.approx(20 / 512)
    assert st.mcnemar(first, first) == 1
    even = torch.tensor([True, False])
    assert st.mcnemar(even, ~even) == 1


def test_mcnemar_survives_many_pairs():
    assert 0 <= st.mcnemar(torch.ones(5000), torch.zeros(5000)) < 1e-300


def test_bootstrap_p_value_tells_a_clear_difference_from_none():
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(100, 1, generator=generator)
    units = torch.arange(100)
    assert st.bootstrap_p_value(st.resampled_means(noise + 1, units)[:, 0]) < 0.01
    assert st.bootstrap_p_value(st.resampled_means(noise - noise.mean(), units)[:, 0]) > 0.5


def test_bootstrap_p_value_is_never_below_what_its_resamples_allow():
    samples = st.resampled_means(torch.ones(20, 1), torch.arange(20))[:, 0]
    assert st.bootstrap_p_value(samples) == st.SMALLEST_P == pytest.approx(2 / 2001)
    assert st.bootstrap_p_value(samples[:500]) == pytest.approx(2 / 500)


@pytest.mark.parametrize(
    ("divisor", "expected"),
    [
        ((0.2, -0.1, 0.5), "native - source is 0.200 [-0.100, 0.500], not above 0 for sure"),
        ((-0.1, -0.3, 0.1), "native - source is -0.100 [-0.300, 0.100], not above 0 for sure"),
        ((-0.5, -0.9, -0.1), "no gap"),
        ((0.01, -0.02, 0.04), "no gap"),
        ((0.5, 0.4, 0.6), "an arm has no score"),
        ((None,), "an arm has no score"),
    ],
)
def test_an_undefined_ratio_is_told_from_one_that_is_not_known(divisor, expected):
    """A gap that is not there is a finding; a wide interval is none."""
    assert st.why_undefined(st.Interval(*divisor), "native - source", "no gap") == expected


def test_few_documents_are_too_few():
    assert st.too_few(9) == "too few documents for intervals (9, at least 10)"
    assert st.too_few(10) is None


def _arms(native, source, mapped, n=200):
    """Answers whose shares right are as given, in nested order so that the pairs are tight."""
    rank = torch.arange(n) / n
    values = torch.stack([(rank < share).double() for share in (native, source, mapped)], 1)
    return st.resampled_means(values, torch.arange(n)).unbind(1)


def test_gap_recovered_is_not_flattered_by_retention():
    """Retention 86 % with the source at 83 %: most of the gap is lost (METHOD, section 5)."""
    native, source, mapped = _arms(1.0, 0.83, 0.86)
    assert st.retention(mapped, native).point == pytest.approx(0.86)
    gap = st.gap_recovered(mapped, source, native)
    assert gap.point == pytest.approx(0.03 / 0.17)
    assert gap.lower < gap.point < gap.upper


def test_gap_recovered_keeps_its_sign():
    native, source, mapped = _arms(0.9, 0.6, 0.3)
    gap = st.gap_recovered(mapped, source, native)
    assert gap.point == pytest.approx(-1)
    assert gap.upper < 0


def test_gap_is_undefined_without_a_gap():
    native, source, mapped = _arms(0.6, 0.6, 0.6)
    assert st.gap_recovered(mapped, source, native) == st.Interval(None)
    native, source, mapped = _arms(0.605, 0.6, 0.605)  # one answer of 200: no gap for sure
    assert st.gap_recovered(mapped, source, native) == st.Interval(None)
    native, source, mapped = _arms(0.5, 0.7, 0.6)
    assert st.gap_recovered(mapped, source, native) == st.Interval(None)


def test_floor_normalised_retention_takes_chance_off():
    native, _, mapped = _arms(0.75, 0.5, 0.5)
    assert st.retention(mapped, native, 0.25).point == pytest.approx(0.5)
    native, _, mapped = _arms(0.25, 0.25, 0.25)
    assert st.retention(mapped, native, 0.25) == st.Interval(None)


@pytest.mark.parametrize(
    ("over_source", "margin", "units", "expected"),
    [
        ((0.2, 0.1, 0.3), (0.5, 0.4, 0.6), 50, "recovers"),
        ((0.01, -0.03, 0.05), (0.5, 0.4, 0.6), 50, "no better than source"),
        ((0.01, -0.3, 0.5), (0.5, 0.4, 0.6), 50, "not enough items"),
        ((-0.2, -0.3, -0.1), (0.5, 0.4, 0.6), 50, "worse than source"),
        ((0.2, 0.1, 0.3), (0.01, -0.02, 0.04), 50, "content-free"),
        ((0.2, 0.1, 0.3), (-0.3, -0.6, 0.0), 50, "content-free"),
        ((0.2, 0.1, 0.3), (0.2, -0.2, 0.6), 50, "not enough items"),
        ((0.2, 0.1, 0.3), (0.5, 0.4, 0.6), 9, "not enough items"),
        ((None, None, None), (0.5, 0.4, 0.6), 50, "not enough items"),
    ],
)
def test_verdict(over_source, margin, units, expected):
    assert expected in st.VERDICTS
    telling = st.Interval(0.6, 0.5, 0.7)
    found = st.verdict(st.Interval(*over_source), st.Interval(*margin), telling, units)
    assert found == expected


@pytest.mark.parametrize(
    ("over_source", "margin", "telling", "units", "expected"),
    [
        ((0.2, 0.1, 0.3), (0.5, 0.4, 0.6), (0.6, 0.5, 0.7), 50, None),
        ((0.2, 0.1, 0.3), (0.5, 0.4, 0.6), (0.6, 0.5, 0.7), 9, "9 documents, of which a verdict"),
        ((None,), (0.5, 0.4, 0.6), (0.6, 0.5, 0.7), 50, "an arm has no score"),
        ((0.2, 0.1, 0.3), (0.5, 0.4, 0.6), (0.1, -0.1, 0.3), 50, "native itself gains nothing"),
        ((0.2, 0.1, 0.3), (0.2, -0.2, 0.6), (0.6, 0.5, 0.7), 50, "the margin over wrong_document"),
        ((0.0, -0.3, 0.3), (0.5, 0.4, 0.6), (0.6, 0.5, 0.7), 50, "the difference from the source"),
    ],
)
def test_what_is_not_enough_is_said(over_source, margin, telling, units, expected):
    found = st.unsure(*(st.Interval(*part) for part in (over_source, margin, telling)), units)
    assert found is None if expected is None else found.startswith(expected)


def test_items_that_native_cannot_answer_decide_nothing():
    good = st.Interval(0.2, 0.1, 0.3)
    assert st.verdict(good, good, st.Interval(0.01, -0.05, 0.07), 50) == "not enough items"
