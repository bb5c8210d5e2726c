"""Which blocks are kept for a choice of layers, and that the runs hold the fewest numbers."""

import itertools
import random

import pytest
from entries import geometry

from kvmap.calibration_files import Scope
from kvmap.chosen import chosen_groups, groups_apart, near_layers
from kvmap.columns import groups, head_sizes
from kvmap.map_options import MapOptions, input_blocks
from kvmap.plan import moments_bytes

SOURCE, TARGET = geometry(6, 2, 4), geometry(5, 4, 6, theta=5e5)
SIZES = head_sizes(SOURCE, TARGET)
CHOICES = [
    ((0,), (0, 1), (2, 3), (3,), (5,)),
    ((0, 5),) * 5,
    ((5,), (4,), (3,), (2,), (1,)),
]


def numbers(found):
    size = lambda blocks: sum(SIZES[block.side] for block in blocks)  # noqa: E731
    return sum(size(g.inputs) * (size(g.inputs) + size(g.outputs)) for g in found)


@pytest.mark.parametrize("layers", CHOICES, ids=str)
@pytest.mark.parametrize(("heads", "joint"), [("all", True), ("matched", False), ("matched", True)])
def test_every_regression_of_the_choice_is_in_one_group(layers, heads, joint):
    found = chosen_groups(groups(SOURCE, TARGET, heads, joint), layers, SIZES)
    assignment = (0, 0, 1, 1) if heads == "matched" else ()
    options = MapOptions(heads=heads, joint=joint, anchor=joint, assignment=assignment)
    for index, row in enumerate(layers):
        for kind, head in itertools.product(("key", "value"), range(4)):
            own = head if heads == "matched" else None
            read = set(input_blocks(options, row, kind, own, (2, 4)))
            assert any(
                read <= set(group.inputs)
                and {(b.kind, b.layer, b.head) for b in group.outputs} >= {(kind, index, head)}
                for group in found
            )
    assert len({group.name for group in found}) == len(found)


@pytest.mark.parametrize("layers", CHOICES, ids=str)
def test_runs_hold_the_fewest_numbers(layers):
    """Against every way to cut five target layers into runs."""
    (whole,) = groups(SOURCE, TARGET, "all", True)

    def cut(ends):
        parts = []
        for start, stop in itertools.pairwise((0, *ends, 5)):
            read = {s for row in layers[start:stop] for s in row}
            inputs = tuple(b for b in whole.inputs if b.side != "source" or b.layer in read)
            outputs = tuple(b for b in whole.outputs if start <= b.layer < stop)
            parts.append(type(whole)("", inputs, outputs))
        return parts

    ways = [ends for n in range(5) for ends in itertools.combinations(range(1, 5), n)]
    fewest = min(numbers(cut(ends)) for ends in ways)
    assert numbers(chosen_groups((whole,), layers, SIZES)) == fewest < numbers((whole,))


@pytest.mark.parametrize("layers", CHOICES[1:], ids=str)
def test_no_choice_of_as_many_layers_takes_more_than_layers_apart(layers):
    found = groups(SOURCE, TARGET, "matched", True)
    most = numbers(groups_apart(found, layers))
    drawn = random.Random(0)
    for _ in range(50):
        choice = tuple(tuple(sorted(drawn.sample(range(6), len(row)))) for row in layers)
        assert numbers(chosen_groups(found, choice, SIZES)) <= most


def test_near_layers_are_neighbours_at_the_same_depth():
    near = [near_layers(at, 5, 6, 3) for at in range(5)]
    assert near == [(0, 1, 2), (0, 1, 2), (1, 2, 3), (3, 4, 5), (3, 4, 5)]


def test_plan_counts_chosen_blocks_only():
    whole = moments_bytes(SOURCE, TARGET, Scope("all", False))
    assert moments_bytes(SOURCE, TARGET, Scope("all", False, CHOICES[0])) < 0.5 * whole
