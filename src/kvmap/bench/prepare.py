"""Find or make the map that a bench of two models by name needs."""

from __future__ import annotations

from collections.abc import Callable

from kvmap import fit
from kvmap.collect_options import CollectOptions
from kvmap.collect_pair import Loading, TextOptions
from kvmap.fit_pair import FitReport, FitRequest, fit_pair

SEQUENCES, LENGTH = 64, 256


def prepared_map(
    names: tuple[str, str],
    recipe: str = fit.DEFAULT_RECIPE,
    loading: Loading | None = None,
    progress: Callable[[str, int, int], None] = lambda step, done, total: None,
) -> FitReport:
    """Return a map fitted on little text, from the cache folder where it is there.

    Its shape is that of the map `kvmap fit` makes, so it takes as long; it knows less.
    """
    text = TextOptions(sequences=SEQUENCES, length=LENGTH)
    request = FitRequest(fit.recipe(recipe))
    return fit_pair(names, text, CollectOptions(), request, loading or Loading(), progress)
