"""Make a map: one file per method, a dict of methods."""

from kvmap.fit.closed_form import FitScores, Splits, fit_closed_form, layer_score
from kvmap.fit.job import Job, closed_form
from kvmap.fit.network import mlp, residual
from kvmap.fit.recipes import (
    DEFAULT_RECIPE,
    RECIPES,
    Recipe,
    describe,
    recipe,
    with_assignment,
    with_lookback,
)

METHODS = {"closed-form": closed_form, "mlp": mlp, "residual": residual}

__all__ = [
    "DEFAULT_RECIPE",
    "METHODS",
    "RECIPES",
    "FitScores",
    "Job",
    "Recipe",
    "Splits",
    "describe",
    "fit_closed_form",
    "layer_score",
    "recipe",
    "with_assignment",
    "with_lookback",
]
