"""R² by layer and head goes into the map, train and held out apart, of the weights it ends with."""

from dataclasses import replace
from pathlib import Path

import measured
import pytest
import torch

from kvmap import artifacts, pipeline
from kvmap.cli import fit_text
from kvmap.errors import UsageError
from kvmap.fit import RECIPES
from kvmap.fit.accuracy import rounded_away
from kvmap.fit_pair import FitReport
from kvmap.mapping import CacheMap

LAYERS = ((0,), (0,), (1,), (2,))
NAMES = {"train.key", "train.value", "held_out.key", "held_out.value"}


def _fitted(made, **changes):
    recipe = replace(RECIPES["paper"], **changes)
    return pipeline.fit_map(made, LAYERS, recipe, lambda *_: None)


def test_a_map_keeps_its_tables_and_their_means_are_its_provenance(calibration, tmp_path):
    cmap = _fitted(calibration("noisy_image")).cmap
    loaded = CacheMap.load(cmap.save(tmp_path / "a.map"))
    assert set(loaded.r2) == NAMES
    for name, table in loaded.r2.items():
        split, kind = name.split(".")
        assert table.shape == (4, 4)
        assert torch.equal(table, cmap.r2[name])
        mapped = table[[layer is not None for layer in cmap.layers]]
        said = cmap.provenance["r2"][split][kind]
        assert mapped.mean().item() == pytest.approx(said, abs=1e-6)
    assert loaded.r2["train.key"].mean() > loaded.r2["held_out.key"].mean()


def test_weights_of_lower_rank_are_measured_again(calibration):
    """Against the whole rank: the closed form's own scores no longer hold."""
    made = calibration("noisy_image")
    whole, low = _fitted(made).cmap, _fitted(made, rank=8).cmap
    assert any(layer and layer.value.up is not None for layer in low.layers)
    assert low.r2["held_out.value"].mean() < whole.r2["held_out.value"].mean() - 0.01
    assert low.provenance["r2"]["held_out"]["value"] == pytest.approx(
        low.r2["held_out.value"].mean().item(), abs=1e-6
    )


def test_measured_again_the_closed_form_has_its_own_scores(calibration):
    """A rank that makes nothing smaller leaves the weights, and so the scores, alone."""
    made = calibration("noisy_image")
    whole, same = _fitted(made).cmap, _fitted(made, rank=1000).cmap
    for name, table in whole.r2.items():
        assert torch.allclose(table, same.r2[name], atol=1e-5)


def test_a_table_of_another_shape_is_refused(tmp_path):
    cmap = replace(measured.twin()[0], r2={"train.key": torch.zeros(2, 2)})
    path = cmap.save(tmp_path / "a.map")
    with pytest.raises(UsageError, match=r"r2.train.key is \(2, 2\), expected \(3, 2\)"):
        CacheMap.load(path)
    assert "r2.train.key" in artifacts.open_artifact(path).names()


def test_more_than_all_explained_is_said_to_be_rounding(calibration):
    cmap = _fitted(calibration("noisy_image")).cmap
    assert not rounded_away(cmap)
    beyond = {name: table.clone() for name, table in cmap.r2.items()}
    beyond["held_out.key"][2, 1] = 1.007
    assert rounded_away(replace(cmap, r2=beyond))


@pytest.mark.parametrize(
    ("products", "hint"),
    [("float32", "collect with --products float64, or give a larger --ridge"), ("float64", None)],
)
def test_products_that_are_wide_already_are_not_asked_for(calibration, products, hint):
    cmap = _fitted(calibration("noisy_image")).cmap
    kept = cmap.provenance["collect"] | {"products": products}
    beyond = {name: table + 1 for name, table in cmap.r2.items()}
    made = replace(cmap, r2=beyond, provenance=cmap.provenance | {"collect": kept})
    (said,) = [
        line
        for line in fit_text.notes(FitReport(made, Path(), Path(), 1, 0.0, ()))
        if "is more than 1" in line
    ]
    assert said.endswith(f"so small a ridge; {hint or 'give a larger --ridge'}")
