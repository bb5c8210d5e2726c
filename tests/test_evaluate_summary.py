"""Figures from scores with known answers."""

import math

import pytest
import torch

from kvmap.evaluate import summary
from kvmap.evaluate.scores import Record, join

ARMS = ("native", "source", "mapped", "wrong_document", "zero")


def _scores(right, task="t", chance=0.25, labels=None, documents=60, questions=4, nll=None):
    """Make scores of arms whose share of right answers is as given, nested and spread evenly."""
    records = []
    for unit in range(documents):
        rank = [((unit * questions + q) * 37 % (documents * questions)) for q in range(questions)]
        share = [r / (documents * questions) for r in rank]
        answers = [[float(s < right.get(arm, 0)) for arm in ARMS] for s in share]
        nats = [[(nll or dict.fromkeys(ARMS, 1.0))[arm] + 0.01 * unit for arm in ARMS]] * questions
        records.append(
            Record(
                unit,
                [labels(q) if labels else {} for q in range(questions)],
                answers if right else [[math.nan] * len(ARMS)] * questions,
                [1] * questions,
                nats,
                [[0.0] * len(ARMS)] * questions,
                [[1.0] * len(ARMS)] * questions,
            )
        )
    return join(records, task, chance, ARMS)


GOOD = {"native": 0.9, "source": 0.5, "mapped": 0.8, "wrong_document": 0.1, "zero": 0.15}


def test_summary_of_known_shares():
    found = summary.summarise(_scores(GOOD))
    assert found["arms"]["mapped"]["accuracy"] == pytest.approx(0.8)
    assert found["retention"] == pytest.approx(0.8 / 0.9)
    assert found["floor_normalised_retention"] == pytest.approx(0.55 / 0.65)
    assert found["gap_recovered"] == pytest.approx(0.75)
    assert found["margin_control"] == "zero"
    assert found["margin"] == pytest.approx(0.65)
    assert found["verdict"] == "recovers"
    assert (found["n"], found["documents"]) == (240, 60)
    low, high = found["intervals"]["gap_recovered"]
    assert low < 0.75 < high
    assert found["tests"]["mapped_source"]["p_mcnemar"] < 1e-6
    assert found["tests"]["mapped_source"]["p_bootstrap"] < 0.01
    assert found["arms"]["native"]["kl_p95"] == 0


def test_verdict_follows_the_shares():
    verdict = lambda **changed: summary.summarise(_scores(GOOD | changed))["verdict"]  # noqa: E731
    assert verdict(mapped=0.3) == "worse than source"
    assert verdict(mapped=0.5) == "no better than source"
    assert verdict(mapped=0.1) == "content-free"
    assert verdict(native=0.1) == "not enough items"
    assert summary.summarise(_scores(GOOD, documents=8))["verdict"] == "not enough items"


def test_gap_without_a_gap_is_undefined_and_says_so():
    found = summary.summarise(_scores(GOOD | {"source": 0.9}))
    assert found["gap_recovered"] is None
    assert "no gap" in found["undefined"]["gap_recovered"]


def test_gap_that_is_not_known_is_not_said_to_be_none():
    """Of twelve answers the source has one less: between none and three in resamples."""
    found = summary.summarise(_scores(GOOD | {"source": 0.8}, documents=12, questions=1))
    assert found["gap_recovered"] is None
    said = found["undefined"]["gap_recovered"]
    assert said.startswith("native - source is 0.083 [0.000, 0.250], not above 0")


def test_what_cannot_be_right_or_has_no_chance_is_undefined_for_that_reason():
    text = summary.summarise(_scores({}, chance=None))["undefined"]
    assert text["retention"] == "nothing can be right or wrong here"
    free = summary.summarise(_scores(GOOD, chance=None))["undefined"]
    assert free == {"floor_normalised_retention": "chance is not known"} | {
        "gap_recovered_nll": free["gap_recovered_nll"]
    }
    lost = summary.summarise(_scores(GOOD | {"native": 0.0}))["undefined"]
    assert lost["retention"] == "native scores nothing to retain"
    assert lost["floor_normalised_retention"] == "native is no better than chance"


@pytest.mark.parametrize(("documents", "tested"), [(9, False), (10, True)])
def test_few_documents_have_no_p(documents, tested):
    found = summary.summarise_all([_scores(GOOD, documents=documents)])
    for figures in (found, found["tasks"]["t"]):
        for test in figures["tests"].values():
            assert (test["p_bootstrap"] is not None) == tested
            assert (test["p_mcnemar"] is not None) == tested
            assert test["interval"] is not None
        for name in ("p_bootstrap", "p_mcnemar"):
            few = None if tested else "too few documents for intervals (9, at least 10)"
            assert figures["undefined"].get(name) == few


def test_text_of_few_documents_has_no_exact_test_to_leave_out():
    found = summary.summarise(_scores({}, chance=None, documents=3))
    assert "p_bootstrap" in found["undefined"]
    assert "p_mcnemar" not in found["undefined"]


def test_text_without_answers_is_judged_by_its_nats():
    nll = {"native": 2.0, "source": 3.0, "mapped": 2.2, "wrong_document": 4.0, "zero": 4.5}
    found = summary.summarise(_scores({}, chance=None, nll=nll))
    assert found["score"] == "nll"
    assert found["arms"]["mapped"]["accuracy"] is None
    assert found["retention"] is None
    assert found["gap_recovered"] == pytest.approx(0.8)
    assert found["verdict"] == "recovers"


def test_tasks_count_alike_however_many_items_they_have():
    small = _scores(GOOD, task="small", documents=20)
    large = _scores(GOOD | {"mapped": 0.5}, task="large", documents=100, chance=0.5)
    found = summary.summarise_all([small, large])
    assert found["arms"]["mapped"]["accuracy"] == pytest.approx(0.65)
    assert found["chance"] == pytest.approx(0.375)
    assert found["n"] == 480
    assert list(found["tasks"]) == ["small", "large"]
    assert found["tasks"]["small"]["retention"] == pytest.approx(0.8 / 0.9)


def test_text_beside_questions_does_not_dilute_accuracy():
    found = summary.summarise_all([_scores(GOOD), _scores({}, task="text", chance=None)])
    assert found["arms"]["mapped"]["accuracy"] == pytest.approx(0.8)
    assert found["n"] == 240
    assert found["arms"]["mapped"]["nll"] == pytest.approx(1.295)


def test_groups_split_by_labels_that_vary():
    labels = lambda question: {"kind": "ab"[question % 2], "length": 64}  # noqa: E731
    found = summary.summarise(_scores(GOOD, labels=labels))["by"]
    assert list(found) == ["kind"]
    assert {name: group["n"] for name, group in found["kind"].items()} == {"a": 120, "b": 120}
    mean = sum(group["arms"]["mapped"]["accuracy"] for group in found["kind"].values()) / 2
    assert mean == pytest.approx(0.8)


def test_grid_has_depths_down_and_lengths_across():
    labels = lambda question: {"depth": question % 2 / 2, "length": 64 * (1 + question // 2)}  # noqa: E731
    scores = _scores(GOOD, labels=labels)
    scores.accuracy[:, 2] = torch.tensor(
        [float(row["depth"] == 0.5 and row["length"] == 64) for row in scores.labels]
    )
    found = summary.summarise(scores)["grid"]
    assert (found["depths"], found["lengths"]) == ([0.0, 0.5], [64, 128])
    assert found["mapped"] == [[0.0, 0.0], [1.0, 0.0]]
    assert summary.summarise(_scores(GOOD))["grid"] is None


def test_drift_has_the_slope_that_was_put_in():
    """Mapped is right at turns 1 and 2 and wrong at 3 and 4; native is always right."""
    records = [
        Record(
            unit,
            [{"turn": turn} for turn in (1, 2, 3, 4)],
            [[1.0, 1.0, float(turn < 3), 0.0, 0.0] for turn in (1, 2, 3, 4)],
            [1] * 4,
            *([[[0.0] * 5] * 4] * 3),
        )
        for unit in range(10)
    ]
    found = summary.summarise(join(records, "talk", 0.0, ARMS))["drift"]
    assert found["mean"] == pytest.approx(0.5)
    assert found["slope"] == pytest.approx(0.4)


def test_missing_arm_is_null():
    scores = _scores(GOOD)
    scores.accuracy[:, 4], scores.nll[:, 4] = torch.nan, torch.nan
    found = summary.summarise(scores)
    assert found["arms"]["zero"]["accuracy"] is None
    assert found["arms"]["zero"]["intervals"]["accuracy"] is None
    assert found["margin_control"] == "wrong_document"
