"""Choose which source layers each target layer reads, and how many.

`kvmap.layers` scores pairs of layers by one-layer probes; here k is chosen, by the held-out R² of
whole fits, and layers are added one by one where they are chosen greedily.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmap.fit.closed_form import Splits, layer_score
from kvmap.fit.recipes import Recipe, with_lookback
from kvmap.geometry import Geometry
from kvmap.layers import LayerScores, choose_greedy, choose_top, score_layers
from kvmap.map_options import MapOptions, weight_shape

AUTO_K = (1, 2, 3, 4, 6, 8, 12, 16, 20, 26, 32)
# Ridges of which each head takes its best while k is chosen; the fit itself has a finer grid.
PROBE_RIDGES = (1e-2, 1e-3, 1e-5)
# Fewer rows than this per input and the in-sample fit says nothing.
LOW_ROWS_PER_INPUT = 4.0


@dataclass(frozen=True)
class Choice:
    """Layers chosen for a map, with the scores of all pairs and of every k tried."""

    scores: LayerScores
    layers: tuple[tuple[int, ...], ...]
    k: int
    tried: dict[int, float]


def select_layers(data: Splits, recipe: Recipe, method: str = "top") -> Choice:
    """Choose source layers for every target layer.

    Args:
        recipe: Its k, or "auto" for the k with the best held-out R², and its inputs.
        method: "top" by single-layer score, or "greedy".
    """
    recipe = with_lookback(recipe, data.train.lookback_layers)
    scores = score_layers(data.train, data.held_out, data.source, data.target)
    if recipe.k != "auto":
        k = min(int(recipe.k), data.source.layers)
        if method == "top":
            return Choice(scores, choose_top(scores, k), k, {})
        return _greedy(data, recipe, scores, k)
    counts = auto_counts(recipe.options, (data.source, data.target), data.train.count)
    if method == "greedy":
        return _greedy(data, recipe, scores, max(counts))
    tried: dict[int, float] = {}
    for k in counts:
        tried[k] = held_out_score(data, choose_top(scores, k), recipe)
        if len(tried) > 2 and max(list(tried.values())[-2:]) < max(tried.values()):
            break
    best = max(tried, key=tried.get)
    return Choice(scores, choose_top(scores, best), best, tried)


def auto_counts(
    options: MapOptions, shapes: tuple[Geometry, Geometry], rows: float, most: int | None = None
) -> list[int]:
    """Return the k worth trying: those that leave rows enough for each input, or 1.

    Args:
        most: k at most; None takes what the source has.
    """
    limit = min(most or shapes[0].layers, shapes[0].layers)
    counts = [k for k in AUTO_K if k < limit] + [limit]
    inputs = {k: weight_shape(options, k, *shapes)[1] for k in counts}
    enough = [k for k in counts if rows >= LOW_ROWS_PER_INPUT * inputs[k]]
    return enough or counts[:1]


def _greedy(data: Splits, recipe: Recipe, scores: LayerScores, k: int) -> Choice:
    def score(layer: int, chosen: tuple[int, ...]) -> float:
        return layer_score(data, layer, chosen, recipe.options, probe_ridges(recipe))

    layers = choose_greedy(data.source.layers, data.target.layers, k, score)
    return Choice(scores, layers, max(map(len, layers)), {})


def probe_ridges(recipe: Recipe) -> tuple[float, ...]:
    """Return the ridges of which each head takes its best while layers are compared."""
    return PROBE_RIDGES if recipe.ridge == "auto" else (float(recipe.ridge),)


def held_out_score(data: Splits, layers: tuple[tuple[int, ...], ...], recipe: Recipe) -> float:
    """Return the held-out R² of these layers, mean over K and V, layers and heads.

    Where the ridge is free, each head takes the better of a coarse grid.
    """
    ridges = probe_ridges(recipe)
    found = [
        layer_score(data, index, chosen, recipe.options, ridges)
        for index, chosen in enumerate(layers)
        if index >= recipe.options.exact_layers
    ]
    return sum(found) / max(len(found), 1)
