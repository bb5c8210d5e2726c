"""The mapping engine against the formula written out: complex rotations and one einsum."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from entries import geometry
from test_geometry import signature

from kvmap import engine
from kvmap.bench.memory import peak_bytes
from kvmap.cache import KVCache
from kvmap.engine import precision
from kvmap.fit import with_assignment
from kvmap.geometry import RopeTable
from kvmap.map_options import MapOptions, weight_shape
from kvmap.mapping import Affine, CacheMap, LayerMap

PLAIN = RopeTable((1.0, 0.3), 1.25)
PAIRS = RopeTable((0.7, 0.1, 0.05), 0.8, "interleaved")
SHAPES = {
    "as many heads": (geometry(5, 4, 4), geometry(3, 4, 6, rope=(PAIRS, None, PAIRS))),
    "more heads": (geometry(5, 2, 4, rope=(PLAIN, None) * 2 + (PLAIN,)), geometry(3, 4, 6)),
    "fewer heads": (geometry(5, 4, 4), geometry(3, 2, 8, theta=5e5)),
}
# Neighbours, neighbours among the layers that are read at all, and scattered ones.
CHOICES = ((0, 1), (1, 3), (0, 4))
COMBINATIONS = [
    MapOptions(heads=heads, joint=joint, anchor=anchor, exact_first=anchor, lookback=lookback)
    for heads, joint, (anchor, lookback) in itertools.product(
        ("all", "matched"), (False, True), ((False, 0), (True, 0), (True, 2))
    )
]
COMBINATIONS += [
    replace(COMBINATIONS[at], lookback_layers=late) for at, late in ((2, (1,)), (11, (0, 3)))
]


def made(shapes, options, parts="plain", seed=0, choices=CHOICES) -> CacheMap:
    """Draw a map of some shapes; `parts` is what each layer's key and value consist of."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *size: torch.randn(*size, generator=generator) / size[-2] ** 0.5  # noqa: E731
    options = with_assignment(options, *shapes)
    layers = []
    for index, chosen in enumerate(choices):
        groups, p, q = weight_shape(options, len(chosen), *shapes)
        affine = {
            "plain": lambda g=groups, p=p, q=q: Affine(draw(g, p, q), draw(g, q)),
            "low rank": lambda g=groups, p=p, q=q: Affine(draw(g, p, 3), draw(g, q), draw(g, 3, q)),
            "shared low rank": lambda g=groups, p=p, q=q, first=draw(groups, p, 3): Affine(
                first, draw(g, q), draw(g, 3, q)
            ),
            "network": lambda g=groups, p=p, q=q: Affine(
                draw(g, p, q),
                draw(g, q),
                network=(Affine(draw(g, p, 5), draw(g, 5)), Affine(draw(g, 5, q), draw(g, q))),
            ),
        }[parts]
        exact = index < options.exact_layers
        layers.append(None if exact else LayerMap(chosen, affine(), affine()))
    sides = [signature(name=n, geometry=g) for n, g in zip("st", shapes, strict=True)]
    return CacheMap(*sides, tuple(layers), options)


def drawn(shape, tokens=9, batch=2, seed=1) -> KVCache:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(  # noqa: E731
        batch, shape.kv_heads, tokens, shape.head_size, generator=generator
    )
    tensors = [tuple(draw() for _ in range(shape.layers)) for _ in range(2)]
    return KVCache(*tensors, torch.stack([torch.arange(tokens) * 7 + 3 * b for b in range(batch)]))


def turned(keys, positions, table, sign):
    """Turn keys by complex multiplication in float64; sign -1 undoes a turn."""
    if table is None:
        return keys.double()
    planes = len(table.inverse_frequencies)
    if table.layout == "half":
        x, y = keys[..., :planes], keys[..., planes : 2 * planes]
    else:
        x, y = keys[..., 0 : 2 * planes : 2], keys[..., 1 : 2 * planes : 2]
    angle = positions[:, None, :, None].double() * torch.tensor(table.inverse_frequencies).double()
    turn = torch.polar(torch.full_like(angle, table.scaling**sign), sign * angle)
    z = torch.complex(x.double(), y.double()) * turn
    parts = (z.real, z.imag)
    first = torch.cat(parts, -1) if table.layout == "half" else torch.stack(parts, -1).flatten(-2)
    return torch.cat((first, keys[..., 2 * planes :].double()), dim=-1)


def expected(cmap, cache, first, index, kind):
    """Write the map's definition out for one layer, [B, H_t, T, D_t] float64."""
    options, positions = cmap.options, cache.positions
    source, target = cmap.source.geometry, cmap.target.geometry
    layer = cmap.layers[index]
    kinds = ("key", "value") if options.joint else (kind,)
    columns = []
    for s in layer.source_layers:
        content = {
            "key": turned(cache.keys[s], positions, source.rope[s], -1),
            "value": cache.values[s].double(),
        }
        columns.append([content[k] for k in kinds])
    parts = [part for group in columns for part in group]
    anchors = []
    if options.anchor:
        anchors = [turned(first[0], positions, target.rope[0], -1), first[1].double()]
    back = [
        torch.nn.functional.pad(tensor, (0, 0, late, -late))
        for late in range(1, options.lookback + 1)
        for layer in options.lookback_layers
        for tensor in (
            turned(cache.keys[layer], positions, source.rope[layer], -1),
            cache.values[layer].double(),
        )
    ]
    made = []
    for head in range(target.kv_heads):
        if options.heads == "matched":
            read = [part[:, options.assignment[head]] for part in parts]
            read += [anchor[:, head] for anchor in anchors]
            read += [part[:, options.assignment[head]] for part in back]
            x, group, out = torch.cat(read, -1), head, slice(None)
        else:
            x = torch.cat([t.transpose(1, 2).flatten(2) for t in (*parts, *anchors, *back)], -1)
            group, out = 0, slice(head * target.head_size, (head + 1) * target.head_size)
        affine = layer.of(kind)
        y = (
            torch.einsum("btp,pq->btq", x, affine.weight[group].double())
            if affine.up is None
            else (x @ affine.weight[group].double() @ affine.up[group].double())
        )
        y = y + affine.bias[group].double()
        if affine.network:
            hidden, last = affine.network
            inner = (x @ hidden.weight[group].double() + hidden.bias[group].double()).clamp_min(0)
            y = y + inner @ last.weight[group].double() + last.bias[group].double()
        made.append(y[..., out])
    made = torch.stack(made, 1)
    return turned(made, positions, target.rope[index], 1) if kind == "key" else made


def check(cmap, cache, out, first, rtol=1e-5):
    for index, layer in enumerate(cmap.layers):
        for kind, found in (("key", out.keys[index]), ("value", out.values[index])):
            if layer is None:
                torch.testing.assert_close(found, first[0 if kind == "key" else 1])
                continue
            wanted = expected(cmap, cache, first, index, kind)
            assert (found.double() - wanted).norm() <= rtol * wanted.norm(), (index, kind)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("options", COMBINATIONS, ids=str)
def test_engine_computes_the_formula(shapes, options):
    cmap, cache = made(shapes, options), drawn(shapes[0])
    first = tuple(drawn(shapes[1], seed=2).keys[:2])
    check(cmap, cache, cmap.apply(cache, first), first)


@pytest.mark.parametrize("parts", ["low rank", "shared low rank", "network"])
def test_parts_of_several_products_are_computed_too(parts):
    shapes = SHAPES["more heads"]
    cmap, cache = made(shapes, MapOptions(heads="matched"), parts), drawn(shapes[0])
    check(cmap, cache, cmap.apply(cache), None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_its_own_digits_only(dtype):
    """The products of half-precision weights with a half-precision cache, rounded once."""
    shapes = SHAPES["as many heads"]
    cmap = made(shapes, MapOptions(heads="matched", joint=True)).to("cpu", dtype)
    cache = drawn(shapes[0]).to(dtype=dtype)
    out = cmap.apply(cache)
    assert {t.dtype for t in (*out.keys, *out.values)} == {dtype}
    check(cmap, cache, out, None, rtol=1e-2)


@pytest.mark.parametrize(
    ("half", "single", "expected"), [(9.0, 1.0, torch.float32), (1.0, 2.0, torch.bfloat16)]
)
def test_a_cpu_computes_in_fp32_where_half_precision_is_slower(monkeypatch, half, single, expected):
    ticks = iter((0.0, half, 10.0, 10.0 + single))
    engine.compute_dtype.cache_clear()
    monkeypatch.setattr(precision, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    assert engine.compute_dtype(torch.bfloat16, "cuda") == torch.bfloat16
    assert engine.compute_dtype(torch.float32, "cpu") == torch.float32
    assert engine.compute_dtype(torch.bfloat16, "cpu") == expected
    engine.compute_dtype.cache_clear()


def test_prepared_map_gives_the_same():
    shapes = SHAPES["fewer heads"]
    cmap, cache = made(shapes, MapOptions()), drawn(shapes[0])
    ready = engine.prepare(cmap.to("cpu", torch.bfloat16), "cpu")
    rounded = cmap.to("cpu", torch.bfloat16).apply(cache)
    torch.testing.assert_close(ready.apply(cache).keys, rounded.keys, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", ["all", "matched"])
def test_writes_into_a_part_of_a_larger_cache_and_nowhere_else(heads, batch):
    shapes = SHAPES["as many heads"]
    cmap, cache = made(shapes, MapOptions(heads=heads)), drawn(shapes[0], batch=batch)
    large = engine.empty_cache(shapes[1], torch.zeros(batch, 20).long(), torch.float32)
    for tensor in (*large.keys, *large.values):
        tensor.fill_(7.0)
    place = KVCache(
        tuple(t[:, :, 5:14] for t in large.keys),
        tuple(t[:, :, 5:14] for t in large.values),
        cache.positions,
    )
    assert cmap.apply(cache, out=place) is place
    check(cmap, cache, place, None)
    rest = [torch.cat((t[:, :, :5], t[:, :, 14:]), 2) for t in (*large.keys, *large.values)]
    assert all((tensor == 7.0).all() for tensor in rest)


@pytest.mark.parametrize("options", COMBINATIONS[::4] + COMBINATIONS[-1:], ids=str)
def test_memory_beside_the_caches_is_bounded_and_does_not_grow_with_tokens(monkeypatch, options):
    """The bound counts what the workspace holds and one layer on its way."""
    shapes = (geometry(5, 2, 32), geometry(3, 2, 32))
    bound = 1 << 20
    monkeypatch.setitem(engine.EXTRA_BYTES, "cpu", bound)
    cmap = made(shapes, options)
    extra = []
    for tokens in (2048, 8192):
        cache = drawn(shapes[0], tokens=tokens, batch=1)
        first = tuple(drawn(shapes[1], tokens=tokens, batch=1).keys[:2])
        out = engine.allocate(shapes[1], cache)
        extra.append(
            peak_bytes(lambda c=cache, f=first, o=out: cmap.apply(c, f, o), torch.device("cpu"))
        )
    assert extra[0] == extra[1]
    assert bound / 4 < extra[1] <= 1.1 * bound


@pytest.mark.parametrize("heads", ["all", "matched"])
def test_what_stands_before_a_part_of_a_context_is_read(heads):
    """A part mapped after others equals its share of the whole; blind to them, it does not."""
    late = (0, 2, 4)
    cmap = made(SHAPES["as many heads"], MapOptions(heads=heads, lookback=3, lookback_layers=late))
    cache = drawn(cmap.source.geometry)
    whole = cmap.apply(cache)
    for start in (1, 2, 5):
        rest, before = cache.slice(start, cache.tokens), cache.slice(0, start)
        part, blind = cmap.apply(rest, before=before), cmap.apply(rest)
        alone = cmap.apply(rest, before=before.only(late))
        torch.testing.assert_close(alone.values, part.values)
        for layer in range(3):
            torch.testing.assert_close(part.keys[layer], whole.keys[layer][:, :, start:])
            torch.testing.assert_close(part.values[layer], whole.values[layer][:, :, start:])
            seen, unseen = (made.values[layer][:, :, 0] for made in (part, blind))
            assert not torch.allclose(seen, unseen)
            later = whole.values[layer][:, :, start + 3 :]
            torch.testing.assert_close(blind.values[layer][:, :, 3:], later)


def test_padding_is_not_looked_back_to():
    """After padding a text maps to what it maps to from its own beginning."""
    cmap = made(SHAPES["fewer heads"], MapOptions(lookback=2, lookback_layers=(0, 1), joint=True))
    cache = drawn(cmap.source.geometry, batch=1)
    mask = torch.arange(cache.tokens)[None] >= 4
    padded = cmap.apply(KVCache(cache.keys, cache.values, cache.positions, mask=mask))
    text = cmap.apply(cache.slice(4, cache.tokens))
    for layer in range(3):
        torch.testing.assert_close(padded.keys[layer][:, :, 4:], text.keys[layer])
        torch.testing.assert_close(padded.values[layer][:, :, 4:], text.values[layer])


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("heads", ["all", "matched"])
def test_layers_that_turn_together_give_what_each_gives_alone(monkeypatch, shapes, heads):
    options = MapOptions(heads=heads, joint=True, anchor=True, exact_first=True, lookback=2)
    cmap, cache = made(shapes, options), drawn(shapes[0], tokens=70)
    first = tuple(drawn(shapes[1], tokens=70, seed=2).keys[:2])
    together = cmap.apply(cache, first)
    monkeypatch.setitem(engine.EXTRA_BYTES, "cpu", 1)
    alone = cmap.apply(cache, first)
    for mine, theirs in zip(
        (*together.keys, *together.values), (*alone.keys, *alone.values), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
