"""Metrics against answers worked out by hand or by another library's definition."""

import math

import pytest
import torch

from kvmap import metrics


def test_r2_from_sums_is_one_for_truth_and_zero_for_the_mean():
    residual, total = torch.tensor([0.0, 8.0, 2.0]), torch.tensor([8.0, 8.0, 202.0])
    assert metrics.r2_from_sums(residual, total).tolist() == pytest.approx([1, 0, 1 - 2 / 202])


def test_r2_of_what_does_not_vary_does_not_divide_by_zero():
    found = metrics.r2_from_sums(torch.tensor([0.0, 3.0]), torch.zeros(2))
    assert found.tolist() == [1, -math.inf]


def test_cosine_handles_zero_vectors():
    first = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    second = torch.tensor([[0.0, 2.0], [0.0, 0.0], [1.0, 0.0], [-2.0, -2.0]])
    assert metrics.cosine(first, second).tolist() == pytest.approx([0, 1, 0, -1])


def test_kl_is_in_nats_and_directed():
    p, q = torch.tensor([0.75, 0.25]).log(), torch.tensor([0.5, 0.5]).log()
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    backward = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2)
    assert metrics.kl_divergence(p, q).item() == pytest.approx(forward, rel=1e-5)
    assert metrics.kl_divergence(q, p).item() == pytest.approx(backward, rel=1e-5)
    assert metrics.kl_divergence(p, p + 3).item() == pytest.approx(0, abs=1e-6)


def test_kl_survives_impossible_tokens_and_padded_vocabularies():
    p = torch.tensor([0.0, 0.0, -torch.inf])
    assert metrics.kl_divergence(p, torch.zeros(3)).item() == pytest.approx(math.log(1.5), rel=1e-5)
    assert metrics.kl_divergence(torch.zeros(2), torch.zeros(5)).item() == 0


def test_top1_agreement_is_by_token():
    p = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    assert metrics.top1_agreement(p, torch.tensor([[0.0, 9.0], [0.0, 1.0]])).tolist() == [
        True,
        False,
    ]


def test_negative_log_likelihood_matches_cross_entropy():
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0, 1, 2], [3, 4, 6]])
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids.flatten(), reduction="none"
    )
    assert torch.allclose(
        metrics.negative_log_likelihood(logits, ids).flatten(), expected, atol=1e-6
    )


def test_mean_and_p95_interpolate():
    mean, p95 = metrics.mean_and_p95(torch.arange(101.0))
    assert (mean, p95) == (50, 95)


def test_token_f1_counts_repeated_words_once_per_pair():
    assert metrics.token_f1("red red box", "red box") == pytest.approx(2 * 2 / 5)
    assert metrics.token_f1("", "the") == 1
    assert metrics.token_f1("", "box") == 0


def test_coqa_f1_leaves_each_reference_out_in_turn():
    """Scores 1, 0.5, 0: leaving out the first leaves 0.5 as the best, else 1."""
    references = ["red", "red box white", "blue"]
    assert metrics.token_f1("red", references[1]) == 0.5
    assert metrics.coqa_f1("red", references) == pytest.approx((0.5 + 1 + 1) / 3)
    assert metrics.coqa_f1("red", ["red"]) == 1
    assert metrics.coqa_f1("red", []) == 0
