"""What a method is given, and the contract that every method keeps.

A method is a function `method(job) -> (layers, scores)` in the dict `kvmap.fit.METHODS`: one
LayerMap per target layer, None where the layer is exact, and how well they predict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvmap.calibration import Calibration
from kvmap.fit.closed_form import FitScores, Splits, fit_closed_form
from kvmap.fit.recipes import Recipe
from kvmap.fit.weights import attention_weights, weighted_splits
from kvmap.mapping import LayerMap
from kvmap.models import LoadedModel

Opener = Callable[[], LoadedModel]
Progress = Callable[[str, int, int], None]
Result = tuple[tuple[LayerMap | None, ...], FitScores]


def splits(calibration: Calibration, native_head: int) -> Splits:
    """Return the moments a fit uses; the first tokens count only where they are to be mapped."""
    with_head = native_head < calibration.index["options"]["native_head"]
    return Splits(
        calibration.moments("train", with_head),
        calibration.moments("held_out", with_head),
        calibration.source.geometry,
        calibration.target.geometry,
    )


@dataclass(frozen=True)
class Job:
    """A fit to do.

    Attributes:
        calibration: Rows, tokens and moments.
        layers: Source layers of each target layer.
        recipe: Its options with the assignment of heads filled in.
        openers: Load the source and the target, where a recipe needs them.
        progress: Told a step's name, what is done and what there is in all.
    """

    calibration: Calibration
    layers: tuple[tuple[int, ...], ...]
    recipe: Recipe
    openers: tuple[Opener, Opener]
    progress: Progress

    @property
    def splits(self) -> Splits:
        """Moments to fit on and to choose on; the calibration keeps them once they are read."""
        return splits(self.calibration, self.recipe.options.native_head)

    def open(self, side: int) -> LoadedModel:
        """Load the source (0) or the target (1) and check that the calibration is theirs.

        Raises:
            UsageError: It is another model.
        """
        loaded = self.openers[side]()
        name = ("source", "target")[side]
        said = f"{self.calibration.path}: its {name}"
        expected = getattr(self.calibration, name)
        expected.require_same(loaded.signature, said, "run `kvmap collect` for this model")
        return loaded


def closed_form(job: Job) -> Result:
    """Fit by ridge regression from moments, with the recipe's row weights."""
    done = iter(range(1, len(job.layers) + 1))
    return fit_closed_form(
        weighted(job),
        job.layers,
        job.recipe.options,
        job.recipe.ridge,
        lambda: job.progress("fit", next(done), len(job.layers)),
    )


def weighted(job: Job) -> Splits:
    """Return the splits, their training rows weighted where the recipe says so."""
    if job.recipe.weights == "none":
        return job.splits
    weights = attention_weights(
        job.open(1),
        job.calibration.sequences["token_ids"].long(),
        job.calibration.index["options"]["stride"],
        lambda done, total: job.progress("weights", done, total),
    )
    return weighted_splits(job.calibration, job.splits, weights, job.layers, job.recipe.options)
