"""R² of the sample fitted on, of held-out text and of the evaluation's stay apart."""

from dataclasses import replace

import measured
import pytest
import torch

from kvmap.cli import layout, show
from kvmap.evaluate import shift
from kvmap.evaluate.evaluation import EvaluateOptions, evaluate
from kvmap.evaluate.page import page
from kvmap.evaluate.report import Report


def _tables():
    held_out = torch.tensor([[1.0, 1.0], [0.8, 0.6], [0.9, 0.9]])
    here = torch.tensor([[1.0, 1.0], [0.7, 0.6], [0.95, 0.4]])
    return {"held_out.key": held_out, "evaluation.key": here, "train.key": held_out + 0.05}


def test_the_head_that_falls_most_is_named_and_none_where_none_falls():
    tables = _tables()
    found = shift.fall(tables, "key")
    assert (found["layer"], found["head"]) == (2, 1)
    assert found["held_out"] == pytest.approx(0.9)
    assert found["evaluation"] == pytest.approx(0.4)
    assert shift.fall(tables, "value") is None
    assert shift.fall(tables | {"evaluation.key": tables["train.key"]}, "key") is None


def test_means_leave_exact_layers_out():
    found = shift.means(_tables(), (1, 2))
    assert found["held_out"] == {"key": pytest.approx(0.8)}
    assert shift.worst(_tables()["held_out.key"]) == {
        "layer": 1,
        "head": 1,
        "r2": pytest.approx(0.6),
    }


@pytest.fixture(scope="module")
def found():
    """A report on a map that says it fitted its sample better than what was held out."""
    cmap, source, target = measured.twin()
    names = [f"{split}.{kind}" for split in ("train", "held_out") for kind in ("key", "value")]
    claimed = {name: torch.full((3, 2), 1.5 if "held_out" in name else 2.0) for name in names}
    options = EvaluateOptions(tasks=("text",), limit=3, lengths=(64,), diagnosed=2)
    return evaluate(replace(cmap, r2=claimed), source, target, options)


def test_a_report_keeps_the_three_texts_apart(found, tmp_path):
    loaded = Report.load(found.save(tmp_path / "a.report"))
    for kind in ("key", "value"):
        assert loaded.tensors[f"r2.train.{kind}"].unique().tolist() == [2.0]
        assert loaded.tensors[f"r2.held_out.{kind}"].unique().tolist() == [1.5]
        assert loaded.tensors[f"r2.evaluation.{kind}"].min() > 1 - 1e-4
    figures = loaded.figures["diagnostics"]["r2"]
    assert figures["mean"]["held_out"] == {"key": 1.5, "value": 1.5}
    assert figures["by_layer"]["train"]["key"] == [2.0] * 3
    assert figures["fall"]["key"]["evaluation"] == pytest.approx(1, abs=1e-4)
    text = layout.render(loaded.figures)
    assert "R² of keys 2.000 in sample, 1.500 held out, 1.000 on these documents; falls" in text


def test_the_page_pictures_all_three(found):
    pytest.importorskip("matplotlib")
    text = page(found)
    for title in ("in sample", "held out", "these documents"):
        assert text.count(f">{title}<") >= 2


def test_show_says_how_far_the_sample_flatters(tmp_path):
    claimed = {f"{split}.key": torch.tensor([[0.9, r2]]) for split, r2 in SPLITS.items()}
    cmap = measured.twin()[0]
    claimed = {name: table.expand(3, 2).contiguous() for name, table in claimed.items()}
    path = replace(cmap, r2=claimed).save(tmp_path / "a.map")
    said = show.predicted(show._r2(path))
    assert said == "held-out R²: keys 0.600, worst 0.300 in head 1 of layer 0 (in sample 0.850)"
    assert show.predicted({}) == ""


SPLITS = {"train": 0.8, "held_out": 0.3}
