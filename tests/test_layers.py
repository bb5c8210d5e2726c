"""Which source layers a target layer reads."""

import numpy as np
import oracles
import pytest
import torch
from entries import SOURCE, TARGET, matrix, moments, noise, related

from kvmap.columns import Block
from kvmap.errors import UsageError
from kvmap.layers import (
    LayerScores,
    choose_greedy,
    choose_top,
    load_layers,
    save_layers,
    score_layers,
)


def scores(train, held_out=None) -> LayerScores:
    held_out = train if held_out is None else held_out
    return LayerScores({"key": train, "value": train}, {"key": held_out, "value": held_out})


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_score_is_the_r2_of_one_layer_and_one_head(heads):
    """Compared with least squares on raw rows, heads averaged; target head h reads h // 2."""
    train, unseen = related(400), related(300, seed=1)
    made = [moments(rows, heads=heads) for rows in (train, unseen)]
    found = score_layers(*made, SOURCE, TARGET)
    for kind in ("key", "value"):
        for target_layer in range(TARGET.layers):
            for source_layer in range(SOURCE.layers):
                expected = np.zeros(2)
                for head in range(4):
                    inputs = [Block("source", kind, source_layer, head // 2)]
                    outputs = [Block("target", kind, target_layer, head)]
                    weight, bias = oracles.ridge(
                        matrix(train, inputs), matrix(train, outputs), 1e-6
                    )
                    for split, rows in enumerate((train, unseen)):
                        guess = matrix(rows, inputs) @ weight + bias
                        expected[split] += oracles.r2(matrix(rows, outputs), guess) / 4
                at = (target_layer, source_layer)
                assert found.train[kind][at] == pytest.approx(expected[0], abs=1e-8)
                assert found.held_out[kind][at] == pytest.approx(expected[1], abs=1e-8)


def test_source_layer_behind_a_target_layer_scores_best():
    def planted(seed):
        rows = noise(500, seed=seed)
        for kind in ("key", "value"):
            source, target = rows.entries["source", kind], rows.entries["target", kind]
            for layer, of in enumerate((2, 0)):
                image = source[of].repeat_interleave(2, dim=1).repeat(1, 1, 2)[..., :6]
                target[layer].mul_(0.1).add_(image)
        return moments(rows)

    found = score_layers(planted(0), planted(1), SOURCE, TARGET)
    assert found.mean().argmax(1).tolist() == [2, 0]
    assert found.mean().max(1).values.min() > 0.95
    assert choose_top(found, 1) == ((2,), (0,))


def test_noise_scores_nothing_on_held_out_sequences():
    found = score_layers(moments(noise(60)), moments(noise(60, seed=1)), SOURCE, TARGET)
    assert found.mean("train").min() > 0
    assert found.mean("held_out").max() <= 0


def test_mean_is_over_keys_and_values():
    key, value = torch.tensor([[0.2, 0.4]]), torch.tensor([[0.6, 0.0]])
    both = {"key": key, "value": value}
    zeros = {"key": key * 0, "value": value * 0}
    torch.testing.assert_close(LayerScores(both, zeros).mean("train"), torch.tensor([[0.4, 0.2]]))
    torch.testing.assert_close(LayerScores(zeros, both).mean(), torch.tensor([[0.4, 0.2]]))


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (1, ((3,), (0,))),
        (2, ((1, 3), (0, 2))),
        (3, ((0, 1, 3), (0, 1, 2))),
        (9, ((0, 1, 2, 3), (0, 1, 2, 3))),
    ],
)
def test_top_takes_the_best_k_in_layer_order(k, expected):
    table = torch.tensor([[0.3, 0.5, 0.1, 0.9], [0.8, 0.2, 0.7, 0.1]])
    assert choose_top(scores(table), k) == expected


WORTH = {0: 3.0, 1: 2.9, 2: 1.0, 3: 0.0}


def judged(layer, chosen):
    """Layers 0 and 1 say the same; 2 adds to either; 3 harms."""
    same = 2.9 if {0, 1} <= set(chosen) else 0.0
    return sum(WORTH[s] for s in chosen) - same - (0.5 if 3 in chosen else 0.0) + 10 * layer


@pytest.mark.parametrize(("k", "expected"), [(1, (0,)), (2, (0, 2)), (3, (0, 2)), (4, (0, 2))])
def test_greedy_adds_what_helps_most_and_stops_when_nothing_does(k, expected):
    """By score alone, 0 and 1 would be the best two."""
    assert choose_greedy(4, 2, k, judged) == (expected, expected)


def test_file_gives_back_scores_choice_and_origin(tmp_path):
    found = score_layers(moments(noise(60)), moments(noise(60, seed=1)), SOURCE, TARGET)
    paths = [save_layers(tmp_path / n, found, ((0, 2), (1,)), {"key": "x", "k": 2}) for n in "ab"]
    again, layers, metadata = load_layers(paths[0])
    assert layers == ((0, 2), (1,))
    assert (metadata["key"], metadata["k"]) == ("x", 2)
    for split in ("train", "held_out"):
        for kind in ("key", "value"):
            assert torch.equal(getattr(again, split)[kind], getattr(found, split)[kind])
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_another_kind_of_file_is_refused(tmp_path):
    from kvmap import artifacts

    artifacts.write(tmp_path / "m", "map", {"x": torch.zeros(1)}, {})
    with pytest.raises(UsageError, match=r"map.*layers"):
        load_layers(tmp_path / "m")
