"""Two maps in one, against doing it the long way."""

import dataclasses

import pytest
import torch
from conftest import token_ids

from kvmap import fit, pipeline
from kvmap.errors import UsageError
from kvmap.fit.choice import select_layers
from kvmap.fit.compose import compose
from kvmap.fit.job import splits
from kvmap.handoff import map_middle
from kvmap.map_options import MapOptions, weight_shape
from kvmap.mapping import Affine, CacheMap, LayerMap
from kvmap.models import prefill


def drawn(source, target, layers, options, seed):
    """Draw a map at random; an exact layer where the options have one."""
    generator = torch.Generator().manual_seed(seed)
    options = fit.with_assignment(options, source.geometry, target.geometry)
    made = []
    for index, chosen in enumerate(layers):
        groups, p, q = weight_shape(options, len(chosen), source.geometry, target.geometry)
        part = lambda g=groups, p=p, q=q: Affine(  # noqa: E731
            torch.randn(g, p, q, generator=generator) / p**0.5,
            torch.randn(g, q, generator=generator),
        )
        made.append(None if index < options.exact_layers else LayerMap(chosen, part(), part()))
    return CacheMap(source, target, tuple(made), options, {})


HUB_LAYERS = ((0, 2), (1,), (0, 1), (2,))
TARGET_LAYERS = ((0, 3), (1, 2), (0,))


@pytest.mark.parametrize("heads", [("all", "all"), ("matched", "all"), ("matched", "matched")])
@pytest.mark.parametrize("joint", [(False, False), (True, False), (False, True)])
def test_a_composed_map_does_what_both_do_in_turn(pair, heads, joint):
    """From 2 heads of 16 to 4 of 24 and back; RoPE differs at every step."""
    source, hub = pair("image")
    ends = [
        MapOptions(heads=heads[0], joint=joint[0]),
        MapOptions(heads=heads[1], joint=joint[1], anchor=True, exact_first=True),
    ]
    first = drawn(source.signature, hub.signature, HUB_LAYERS, ends[0], 1)
    second = drawn(hub.signature, source.signature, TARGET_LAYERS, ends[1], 2)
    cache = prefill(source, token_ids(2, 12, 3))[0]
    expected = map_middle(second, source, first.apply(cache))
    found = map_middle(compose(first, second), source, cache)
    for made, wanted in zip(
        (*found.keys, *found.values), (*expected.keys, *expected.values), strict=True
    ):
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)


def test_maps_that_do_not_compose_are_refused(pair):
    source, hub = pair("image")
    first = drawn(source.signature, hub.signature, HUB_LAYERS, MapOptions(), 1)
    second = drawn(hub.signature, source.signature, TARGET_LAYERS, MapOptions(), 2)
    with pytest.raises(
        UsageError, match=r"the first map's target is .* found .*; give a second map"
    ):
        compose(first, first)
    anchored = drawn(source.signature, hub.signature, HUB_LAYERS, MapOptions(anchor=True), 1)
    with pytest.raises(UsageError, match=r"own first layer.*--no-anchor --no-exact-first"):
        compose(anchored, second)
    late = drawn(hub.signature, source.signature, TARGET_LAYERS, MapOptions(lookback=1), 2)
    with pytest.raises(UsageError, match=r"--no-anchor .*; and the second map .*--lookback 0"):
        compose(anchored, late)
    geometry = hub.signature.geometry
    rope = tuple(dataclasses.replace(t, scaling=2 * t.scaling) for t in geometry.rope)
    for changes in (
        {"rope": rope},
        {"layers": 9, "rope": geometry.rope[:1] * 9},
        {"head_size": 2 * geometry.head_size},
    ):
        wrong = dataclasses.replace(geometry, **changes)
        other = dataclasses.replace(hub.signature, geometry=wrong)
        with pytest.raises(
            UsageError, match=r"target is .* found it with another cache shape or RoPE"
        ):
            compose(first, dataclasses.replace(second, source=other))
    step = Affine(torch.zeros(1, 32, 32), torch.zeros(1, 32))
    bent = second.each(lambda _, part: dataclasses.replace(part, network=(step,)))
    with pytest.raises(UsageError, match=r"has networks.*closed form"):
        compose(first, bent)


def test_a_composed_map_is_measured_on_a_calibration(pair, calibration):
    """After a map, one that changes nothing: the R² of the first, by layer and head."""
    found = calibration("noisy_image")
    data = splits(found, 0)
    recipe = dataclasses.replace(fit.recipe("paper"), k=2)
    layers = select_layers(data, recipe).layers
    first = pipeline.fit_map(found, layers, recipe, lambda *_: None).cmap
    target = found.target
    eye = Affine(torch.eye(target.geometry.width)[None], torch.zeros(1, target.geometry.width))
    same = tuple(LayerMap((layer,), eye, eye) for layer in range(target.geometry.layers))
    second = CacheMap(target, target, same, MapOptions())
    made = pipeline.measure_accuracy(compose(first, second), found)
    for name, table in first.r2.items():
        torch.testing.assert_close(made.r2[name], table, rtol=1e-4, atol=1e-5)
    other = calibration("image")
    with pytest.raises(UsageError, match=r"the map's source is .*calibration of the same pair"):
        pipeline.measure_accuracy(made, other)
