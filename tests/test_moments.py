"""Second moments: streaming, batch and merged halves are the same numbers."""

import itertools

import numpy as np
import oracles
import pytest
import torch
from entries import SOURCE, TARGET, blocks, empty, matrix, moments, noise, part, related

from kvmap.columns import Block
from kvmap.errors import UsageError
from kvmap.moments import Rows

RELATIVE = 1e-10
INPUTS = [*blocks(SOURCE, "source", "key"), *blocks(SOURCE, "source", "value")]
OUTPUTS = [*blocks(TARGET, "target", "value"), *blocks(TARGET, "target", "key")]


def assert_is_batch_covariance(found, rows, inputs=INPUTS, outputs=OUTPUTS) -> None:
    """Compare with the two-pass covariance of the raw rows, each array relative to its largest."""
    x, y = matrix(rows, inputs), matrix(rows, outputs)
    gram, cross = oracles.covariance(x, y)
    square = ((y - y.mean(0)) ** 2).sum(0)
    means = (x.mean(0), y.mean(0))
    assert found.count == len(x)
    for name, expected in zip(
        ("gram", "cross", "output_square", "input_mean", "output_mean"),
        (gram, cross, square, *means),
        strict=True,
    ):
        error = np.abs(getattr(found, name).numpy() - expected).max()
        assert error <= RELATIVE * np.abs(expected).max(), name


@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("cuts", [(), (1,), (700, 701, 1500), (0, 0, 2300)])
def test_streaming_is_batch(cuts, mean):
    """Pieces of any size, empty ones included; 2,500 rows are more than one chunk."""
    rows, made = noise(2500, mean=mean), empty()
    edges = (0, *cuts, 2500)
    for start, stop in itertools.pairwise(edges):
        made.update(part(rows, start, stop))
    assert made.count == 2500
    assert_is_batch_covariance(made.covariance(INPUTS, OUTPUTS), rows)


@pytest.mark.parametrize("mean", [0.0, 1e3])
def test_merged_halves_are_batch(mean):
    rows = noise(900, mean=mean)
    for first, second in ((0, 400), (400, 0)):
        made = moments(part(rows, first, first + 400 if first == 0 else 900))
        made.merge(moments(part(rows, second, 400 if second == 0 else 900)))
        assert_is_batch_covariance(made.covariance(INPUTS, OUTPUTS), rows)


def test_merging_halves_with_other_means_counts_the_difference():
    """The between-batch part is all there is when each half is constant."""
    first, second = noise(50, mean=100.0), noise(70, seed=1, mean=-20.0)
    both = {
        name: {at: torch.cat((own, second.entries[name][at])) for at, own in layers.items()}
        for name, layers in first.entries.items()
    }
    made = moments(first)
    made.merge(moments(second))
    assert_is_batch_covariance(made.covariance(INPUTS, OUTPUTS), Rows(both))


def test_merging_nothing_changes_nothing():
    rows = noise(60)
    made = moments(rows)
    made.merge(empty())
    assert_is_batch_covariance(made.covariance(INPUTS, OUTPUTS), rows)
    fresh = empty()
    fresh.merge(made)
    assert_is_batch_covariance(fresh.covariance(INPUTS, OUTPUTS), rows)


def test_large_means_do_not_cancel():
    """Sums of raw fp32 squares at mean 1,000 would leave no digit of a variance of one."""
    rows = noise(4000, mean=1e3)
    found = moments(rows).covariance(INPUTS, OUTPUTS)
    assert_is_batch_covariance(found, rows)
    naive = matrix(rows, INPUTS).astype(np.float32)
    uncentred = (naive.T @ naive) / 4000 - np.outer(naive.mean(0), naive.mean(0))
    assert np.abs(uncentred - found.gram.numpy() / 4000).max() > 0.01


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("heads", ["all", "matched"])
def test_any_selection_in_any_order_is_its_own_covariance(heads, joint):
    """With matched heads, target heads 2 and 3 read source head 1."""
    rows = related(300)
    inputs = [Block("source", "key", 2, 1), Block("source", "key", 0, 1)]
    outputs = [Block("target", "key", 1, 3), Block("target", "key", 0, 3)]
    found = moments(rows, heads=heads, joint=joint).covariance(inputs, outputs)
    assert_is_batch_covariance(found, rows, inputs, outputs)


def test_the_anchor_is_an_input_beside_the_source():
    rows = related(300)
    inputs = [
        Block("target", "value", 0, 2),
        Block("source", "key", 1, 0),
        Block("target", "key", 0, 1),
    ]
    outputs = [Block("target", "value", 1, 0)]
    assert_is_batch_covariance(moments(rows).covariance(inputs, outputs), rows, inputs, outputs)


@pytest.mark.parametrize(
    ("heads", "joint", "inputs"),
    [
        ("all", False, [Block("source", "key", 0, 0), Block("source", "value", 0, 0)]),
        ("all", False, [Block("target", "key", 0, 0)]),
        ("matched", True, [Block("source", "key", 0, 0), Block("source", "key", 0, 1)]),
        ("all", True, [Block("target", "key", 1, 0)]),
    ],
)
def test_blocks_not_recorded_together_are_refused(heads, joint, inputs):
    made = moments(noise(20), heads=heads, joint=joint)
    with pytest.raises(UsageError, match=r"does not record these inputs together.*kvmap collect"):
        made.covariance(inputs, [Block("target", "key", 0, 0)])


@pytest.mark.parametrize("other", [{"heads": "matched"}, {"joint": False}])
def test_moments_of_other_blocks_do_not_merge(other):
    with pytest.raises(UsageError, match=r"cover different blocks.*same options"):
        moments(noise(20)).merge(moments(noise(20), **other))


def test_moments_are_float64():
    assert {tensor.dtype for tensor in moments(noise(5)).tensors.values()} == {torch.float64}
