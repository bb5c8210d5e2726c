"""Which blocks of two caches stand beside each other in a design matrix."""

import dataclasses

import pytest
from test_geometry import GEOMETRY

from kvmap.columns import BACK, Block, groups, head_assignment

SOURCE = dataclasses.replace(GEOMETRY, layers=2, kv_heads=2, rope=(None,) * 2)
TARGET = dataclasses.replace(GEOMETRY, layers=3, kv_heads=4, rope=(None,) * 3)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (2, 2, (0, 1)),
        (2, 4, (0, 0, 1, 1)),
        (4, 2, (0, 2)),
        (3, 5, (0, 0, 1, 1, 2)),
        (1, 3, (0, 0, 0)),
    ],
)
def test_each_target_head_reads_the_source_head_at_its_place(source, target, expected):
    assert head_assignment(source, target) == expected


def blocks_of(group):
    return set(group.inputs), set(group.outputs)


def every(geometry, side, kind):
    layers, heads = range(geometry.layers), range(geometry.kv_heads)
    return {Block(side, kind, layer, head) for layer in layers for head in heads}


def test_all_heads_keep_keys_and_values_apart():
    key, value = groups(SOURCE, TARGET, "all", joint=False)
    assert blocks_of(key) == (every(SOURCE, "source", "key"), every(TARGET, "target", "key"))
    assert blocks_of(value) == (every(SOURCE, "source", "value"), every(TARGET, "target", "value"))


def test_joint_keeps_both_kinds_and_the_anchor_beside_each_other():
    """The anchor is the target's own layer 0, which it has exactly and cheaply."""
    (both,) = groups(SOURCE, TARGET, "all", joint=True)
    inputs, outputs = blocks_of(both)
    assert outputs == every(TARGET, "target", "key") | every(TARGET, "target", "value")
    anchors = {block for block in outputs if block.layer == 0}
    own = every(SOURCE, "source", "key") | every(SOURCE, "source", "value")
    back = {Block(side, b.kind, 0, b.head) for side in BACK for b in own if b.layer == 0}
    assert inputs == own | anchors | back


@pytest.mark.parametrize("joint", [False, True])
def test_matched_heads_see_their_own_source_head_only(joint):
    found = groups(SOURCE, TARGET, "matched", joint)
    assert len(found) == (4 if joint else 8)
    for group in found:
        (target_head,) = {block.head for block in group.outputs}
        read = {block.head for block in group.inputs if block.side == "source"}
        assert read == {head_assignment(2, 4)[target_head]}
    covered = [block for group in found for block in group.outputs]
    assert len(covered) == len(set(covered)) == 2 * 3 * 4


@pytest.mark.parametrize("heads", ["all", "matched"])
@pytest.mark.parametrize("joint", [False, True])
def test_names_are_unique_and_no_block_is_kept_twice_in_a_group(heads, joint):
    found = groups(SOURCE, TARGET, heads, joint)
    assert len({group.name for group in found}) == len(found)
    for group in found:
        assert len(set(group.inputs)) == len(group.inputs)
        assert len(set(group.outputs)) == len(group.outputs)
