"""What a map does to a cache, held against least squares on raw rows and complex rotations."""

import dataclasses
import itertools

import numpy as np
import oracles
import pytest
import torch
from entries import SOURCE, TARGET, blocks, matrix, moments, related
from test_geometry import signature

from kvmap import artifacts
from kvmap.cache import KVCache
from kvmap.columns import Block
from kvmap.engine import workspace
from kvmap.errors import UsageError
from kvmap.fit import Splits, fit_closed_form, with_assignment
from kvmap.mapping import CacheMap, MapOptions

LAYERS = ((0, 2), (1, 2))
RIDGE = 1e-4
TOKENS = 7
POSITIONS = torch.stack((torch.arange(TOKENS), 40 + 3 * torch.arange(TOKENS)))
COMBINATIONS = [
    MapOptions(heads=heads, joint=joint, anchor=anchor, exact_first=exact)
    for heads, joint, anchor, exact in itertools.product(
        ("all", "matched"), (False, True), (False, True), (False, True)
    )
    if not anchor or exact
]


def describe(options: MapOptions) -> str:
    flags = ("joint", "anchor", "exact_first")
    return "-".join((options.heads, *(flag for flag in flags if getattr(options, flag))))


def rotated(rows, side: str, shape) -> KVCache:
    """Make a cache [2, H, TOKENS, D] of the first rows, rotated by the oracle."""
    keys, values = [], []
    for layer, table in enumerate(shape.rope):
        content, value = (
            rows.entries[side, kind][layer][: 2 * TOKENS].unflatten(0, (2, TOKENS)).transpose(1, 2)
            for kind in ("key", "value")
        )
        turned = oracles.rotate(
            content.numpy(), POSITIONS.numpy(), np.array(table.inverse_frequencies), table.scaling
        )
        keys.append(torch.from_numpy(turned).float())
        values.append(value.contiguous())
    return KVCache(tuple(keys), tuple(values), POSITIONS, POSITIONS + 3)


def fitted(options: MapOptions, rows=None, held_out=None) -> CacheMap:
    rows = related(500) if rows is None else rows
    options = with_assignment(options, SOURCE, TARGET)
    made = moments(rows)
    unseen = made if held_out is None else moments(held_out)
    layers, _ = fit_closed_form(Splits(made, unseen, SOURCE, TARGET), LAYERS, options, RIDGE)
    return CacheMap(
        signature(name="small", geometry=SOURCE, weights_digest="s"),
        signature(name="large", geometry=TARGET, weights_digest="t"),
        layers,
        options,
    )


def first_layer(rows):
    whole = rotated(rows, "target", TARGET)
    return whole.keys[0], whole.values[0]


def expected_content(rows, fresh, options, kind, layer, head) -> np.ndarray:
    """Regress one target head on everything its options let it read; predict fresh rows."""
    read = range(2) if options.heads == "all" else (head // 2,)
    kinds = ("key", "value") if options.joint else (kind,)
    inputs = [Block("source", k, s, h) for h in read for k in kinds for s in LAYERS[layer]]
    if options.anchor:
        own = range(4) if options.heads == "all" else (head,)
        inputs += [Block("target", k, 0, h) for h in own for k in ("value", "key")]
    outputs = [Block("target", kind, layer, head)]
    weight, bias = oracles.ridge(matrix(rows, inputs), matrix(rows, outputs), RIDGE)
    return matrix(fresh, inputs)[: 2 * TOKENS] @ weight + bias


@pytest.mark.parametrize("options", COMBINATIONS, ids=describe)
def test_map_is_strip_regress_rotate(options):
    """The order of inputs in the fit and in the application need not be known to agree."""
    rows, fresh = related(500), related(50, seed=1)
    cmap = fitted(options, rows)
    first = first_layer(fresh) if cmap.needs_target else None
    found = cmap.apply(rotated(fresh, "source", SOURCE), first)
    assert found.layers == TARGET.layers
    for layer, head in itertools.product(range(TARGET.layers), range(TARGET.kv_heads)):
        if layer == 0 and options.exact_first:
            assert torch.equal(found.keys[0], first[0])
            assert torch.equal(found.values[0], first[1])
            continue
        table = TARGET.rope[layer]
        key, value = (
            expected_content(rows, fresh, options, kind, layer, head).reshape(2, TOKENS, -1)[
                :, None
            ]
            for kind in ("key", "value")
        )
        frequencies = np.array(table.inverse_frequencies)
        key = oracles.rotate(key, POSITIONS.numpy(), frequencies, table.scaling)
        np.testing.assert_allclose(found.keys[layer][:, head].numpy(), key[:, 0], atol=2e-4)
        np.testing.assert_allclose(found.values[layer][:, head].numpy(), value[:, 0], atol=2e-4)


def test_what_goes_with_the_cache_stays_with_it():
    cache = rotated(related(50), "source", SOURCE)
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[0, :2] = False
    found = fitted(MapOptions()).apply(dataclasses.replace(cache, mask=mask))
    assert torch.equal(found.positions, POSITIONS)
    assert torch.equal(found.token_ids, POSITIONS + 3)
    assert torch.equal(found.mask, mask)


def test_source_cache_is_left_alone():
    cache = rotated(related(50), "source", SOURCE)
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    fitted(MapOptions()).apply(cache)
    after = (*cache.keys, *cache.values)
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_long_caches_are_mapped_in_chunks_alike(monkeypatch, chunk):
    rows = related(50)
    cmap = fitted(MapOptions(joint=True, anchor=True, exact_first=True))
    cache, first = rotated(rows, "source", SOURCE), first_layer(rows)
    whole = cmap.apply(cache, first)
    monkeypatch.setattr(workspace, "LEAST_TOKENS", chunk)
    monkeypatch.setitem(workspace.MOST_TOKENS, "cpu", chunk)
    for one, other in zip(cmap.apply(cache, first).keys, whole.keys, strict=True):
        torch.testing.assert_close(one, other)


def test_bf16_cache_gives_bf16_cache_near_the_fp32_one():
    rows = related(50)
    cmap, cache = fitted(MapOptions()), rotated(rows, "source", SOURCE)
    exact, rounded = cmap.apply(cache), cmap.apply(cache.to(dtype=torch.bfloat16))
    for one, other in zip(exact.keys, rounded.keys, strict=True):
        assert other.dtype == torch.bfloat16
        assert (one - other.float()).norm() < 0.02 * one.norm()


def test_cache_of_another_shape_is_refused():
    rows = related(50)
    said = r"the cache to map: found 2 layers of keys, expected 3 of small"
    with pytest.raises(UsageError, match=said):
        fitted(MapOptions()).apply(rotated(rows, "target", TARGET))


@pytest.mark.parametrize("options", [MapOptions(exact_first=True), MapOptions(anchor=True)])
def test_missing_first_layer_is_said(options):
    cmap = fitted(options)
    assert cmap.needs_target
    with pytest.raises(UsageError, match=r"reads the target's own first layer; pass the target"):
        cmap.apply(rotated(related(50), "source", SOURCE))


READING = MapOptions(exact_first=True, anchor=True, lookback=2, lookback_layers=(0, 2))
LOWEST = "the target's own lowest layers: "
BEFORE = "the cache of the tokens before"
each = lambda change: lambda tensors: tuple(map(change, tensors))  # noqa: E731


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("cache", lambda c: c.slice(0, 0), "has no tokens, expected one at least"),
        ("cache", lambda c: c.first(0), "expected .* of one sequence at least"),
        ("first", lambda f: f[:1], f"{LOWEST}found 0 layers of values, expected 1 of large"),
        ("first", lambda f: (), f"{LOWEST}found 0 layers of keys, expected 1 of large"),
        ("first", each(lambda t: t[:, :, 1:]), rf"{LOWEST}layer 0's keys have shape \(2, 4, 6"),
        ("first", each(lambda t: t[:1]), rf"{LOWEST}layer 0's keys have shape \(1, 4"),
        ("first", each(lambda t: t[:, :1]), rf"{LOWEST}layer 0's keys have shape \(2, 1"),
        ("first", each(lambda t: t[..., 1:]), rf"{LOWEST}layer 0's keys .* 7, 5\)"),
        ("first", each(lambda t: t.int()), f"{LOWEST}layer 0's keys .* in torch.int32"),
        ("before", lambda c: c.only((0,)), f"{BEFORE}: found 1 layers of keys, expected 3 of sm"),
        ("before", lambda c: c.first(1), f"{BEFORE} is of 1 sequences, expected 2 as of the cach"),
        ("out", lambda c: c.only((0,)), "the cache to write: found 1 layers of keys, expected 2"),
        ("out", lambda c: c.slice(0, 6), r"to write is for \[2, 6\] .*, expected \[2, 7\] as of"),
        ("out", lambda c: c.first(1), r"to write is for \[1, 7\] .*, expected \[2, 7\] as of"),
    ],
)
def test_what_goes_with_a_cache_is_checked_before_any_work(monkeypatch, part, change, said):
    rows = related(50)
    cmap, cache = fitted(MapOptions(exact_first=True)), rotated(rows, "source", SOURCE)
    given = {"cache": cache, "first": first_layer(rows), "before": cache}
    given["out"] = rotated(rows, "target", TARGET)
    given[part] = change(given[part])
    cmap = dataclasses.replace(cmap, options=READING)
    monkeypatch.setattr("kvmap.mapping.engine.apply", None)
    with pytest.raises(UsageError, match=said):
        cmap.apply(**given)


def test_map_without_exact_parts_needs_no_target():
    assert not fitted(MapOptions()).needs_target


@pytest.mark.parametrize("options", COMBINATIONS, ids=describe)
def test_file_gives_back_the_map(tmp_path, options):
    cmap = dataclasses.replace(fitted(options), provenance={"text": "made up"})
    path = cmap.save(tmp_path / "m")
    again = CacheMap.load(path)
    assert again.options == cmap.options
    assert (again.source, again.target) == (cmap.source, cmap.target)
    assert again.provenance == {"text": "made up"}
    assert [layer and layer.source_layers for layer in again.layers] == [
        layer and layer.source_layers for layer in cmap.layers
    ]
    rows = related(50)
    cache = rotated(rows, "source", SOURCE)
    first = first_layer(rows) if cmap.needs_target else None
    one, other = cmap.apply(cache, first), again.apply(cache, first)
    assert all(torch.equal(*pair) for pair in zip(one.keys, other.keys, strict=True))
    assert all(torch.equal(*pair) for pair in zip(one.values, other.values, strict=True))
    assert path.read_bytes() == again.save(tmp_path / "n").read_bytes()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # k = 2 layers; widths 2 * 4 and 4 * 6; two target layers, keys and values.
        (MapOptions(), 2 * 2 * (16 * 24 + 24)),
        (MapOptions(heads="matched"), 2 * 2 * 4 * (8 * 6 + 6)),
        (MapOptions(joint=True, anchor=True, exact_first=True), 2 * ((32 + 48) * 24 + 24)),
    ],
)
def test_parameters_are_counted(options, expected):
    assert fitted(options).parameters == expected


def test_source_layers_are_those_read():
    assert fitted(MapOptions()).source_layers == (0, 1, 2)
    assert fitted(MapOptions(exact_first=True)).source_layers == (1, 2)


def _spoilt(tmp_path, tensors=None, **changes):
    """Write a map whose header or tensors are changed, with a digest that fits them."""
    cmap = fitted(MapOptions())
    artifact = artifacts.open_artifact(cmap.save(tmp_path / "sound"), "map")
    data = artifact.metadata | changes
    return artifacts.write(tmp_path / "spoilt", "map", artifact.tensors() | (tensors or {}), data)


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"layers": [[0, 2]]}, {}, r"found 1 layers and 0 exact ones, expected 2"),
        (
            {"layers": [[0, 2], [1]]},
            {},
            r"layer 1's key weight is \(1, 16, 24\), expected \(1, 8, 24\)",
        ),
        (
            {"layers": [[0, 2], [1, 3]]},
            {},
            r"layer 1 reads source layers \[1, 3\], expected 0 to 2",
        ),
        ({"layers": [[0, 2], [1, -1]]}, {}, r"layer 1 reads source layers \[1, -1\]"),
        (
            {"layers": [None, None], "options": dataclasses.asdict(MapOptions(native_layers=3))},
            {},
            r"found 2 layers and 3 exact ones, expected 2, exact ones among them",
        ),
        (
            {"options": dataclasses.asdict(MapOptions(lookback=1, lookback_layers=(0, 3)))},
            {},
            r"reads layer 3 of the tokens before, expected 0 to 2 of ",
        ),
        ({"options": {"heads": "some"}}, {}, r"(header is not sound|heads)"),
        ({"options": {}}, {}, r"header is not sound"),
        ({"source": {}}, {}, r"header is not sound"),
        ({}, {"layers.0.value.weight": torch.zeros(1, 16, 25)}, r"layer 0's value weight"),
        ({}, {"layers.0.value.bias": torch.zeros(1, 25)}, r"layer 0's value bias"),
    ],
)
def test_unsound_map_is_refused(tmp_path, changes, tensors, message):
    path = _spoilt(tmp_path, tensors, **changes)
    with pytest.raises(UsageError, match=message) as caught:
        CacheMap.load(path)
    assert "spoilt" in str(caught.value)


def test_file_of_another_kind_is_refused(tmp_path):
    artifacts.write(tmp_path / "c", "cache", {"x": torch.zeros(1)}, {})
    with pytest.raises(UsageError, match=r"cache.*map"):
        CacheMap.load(tmp_path / "c")


def test_scores_are_r2_on_raw_rows_for_both_splits():
    train, unseen = related(500), related(200, seed=2)
    options = MapOptions(joint=True)
    splits = Splits(moments(train), moments(unseen), SOURCE, TARGET)
    _, scores = fit_closed_form(splits, LAYERS, options, RIDGE)
    for kind in ("key", "value"):
        inputs = [
            Block("source", k, s, h) for s in LAYERS[1] for k in ("key", "value") for h in (0, 1)
        ]
        outputs = [b for b in blocks(TARGET, "target", kind) if b.layer == 1]
        weight, bias = oracles.ridge(matrix(train, inputs), matrix(train, outputs), RIDGE)
        for split, rows in (("train", train), ("held_out", unseen)):
            guess, truth = matrix(rows, inputs) @ weight + bias, matrix(rows, outputs)
            for head in range(4):
                own = slice(6 * head, 6 * head + 6)
                found = getattr(scores, split)[kind][1, head]
                assert float(found) == pytest.approx(
                    oracles.r2(truth[:, own], guess[:, own]), abs=1e-7
                )


def test_scores_know_nothing_of_exact_layers():
    splits = Splits(moments(related(100)), moments(related(100, seed=1)), SOURCE, TARGET)
    _, scores = fit_closed_form(splits, LAYERS, MapOptions(exact_first=True), RIDGE)
    for table in (scores.train["key"], scores.held_out["value"], scores.ridge["key"]):
        assert table[0].isnan().all()
        assert not table[1].isnan().any()


def test_automatic_ridge_is_best_on_held_out_rows():
    """Few rows and much noise: a ridge far from the least one of the grid."""
    train, unseen = related(40, unexplained=2.0), related(400, seed=1, unexplained=2.0)
    splits = Splits(moments(train), moments(unseen), SOURCE, TARGET)
    _, automatic = fit_closed_form(splits, LAYERS, MapOptions(), "auto")
    for kind in ("key", "value"):
        for layer in range(TARGET.layers):
            inputs = [Block("source", kind, s, h) for s in LAYERS[layer] for h in (0, 1)]
            outputs = [b for b in blocks(TARGET, "target", kind) if b.layer == layer]
            errors = {}
            for ridge in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
                weight, bias = oracles.ridge(matrix(train, inputs), matrix(train, outputs), ridge)
                miss = matrix(unseen, outputs) - matrix(unseen, inputs) @ weight - bias
                errors[ridge] = (miss**2).reshape(-1, 4, 6).sum((0, 2))
            for head in range(4):
                best = min(errors, key=lambda ridge: errors[ridge][head])
                assert float(automatic.ridge[kind][layer, head]) == best


def test_rows_per_input_counts_the_widest_regression():
    splits = Splits(moments(related(320)), moments(related(100, seed=1)), SOURCE, TARGET)
    _, scores = fit_closed_form(splits, LAYERS, MapOptions(), RIDGE)
    assert scores.rows_per_input == 320 / 16
    joint = MapOptions(joint=True, anchor=True, exact_first=True)
    _, scores = fit_closed_form(splits, LAYERS, joint, RIDGE)
    assert scores.rows_per_input == 320 / (32 + 48)


def test_pure_noise_fits_in_sample_only():
    from entries import noise

    splits = Splits(moments(noise(40)), moments(noise(200, seed=1)), SOURCE, TARGET)
    _, scores = fit_closed_form(splits, LAYERS, MapOptions(), 1e-6)
    assert scores.mean("train", "key") > 0.3
    assert scores.mean("held_out", "key") <= 0
    assert scores.mean("held_out", "value") <= 0
