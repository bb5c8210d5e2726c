"""The fused kernel in triton's interpreter against the formula written out."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import test_engine
import test_paged
from entries import geometry
from test_engine import COMBINATIONS, check, drawn

from kvmap.cache import KVCache
from kvmap.engine import apply, empty_cache, fused, kernel_wanted
from kvmap.geometry import RopeTable
from kvmap.map_options import MapOptions

# As small as can be: the interpreter takes hundredths of a second for every step of every head.
SHAPES = {
    "as many heads": (geometry(5, 2, 4), geometry(2, 2, 6)),
    "more heads": (geometry(5, 1, 4), geometry(2, 2, 6)),
    "fewer heads": (geometry(5, 2, 4), geometry(2, 1, 8)),
}
SMALL = fused.Tile(rows=32, planes=16)


def whole(size: int, theta: float) -> RopeTable:
    """Turn all channels, as the kernel requires."""
    return RopeTable(tuple(theta ** (-i / (size // 2)) for i in range(size // 2)), 1.25)


def shapes(name: str):
    """Return two models of which some source layer's keys are not turned at all."""
    source, target = SHAPES[name]
    return (
        replace(source, rope=(whole(source.head_size, 1e4), None) * 2 + (None,)),
        replace(target, rope=(whole(target.head_size, 5e5),) * target.layers),
    )


def made(pair, options, parts="plain"):
    return test_engine.made(pair, options, parts, choices=((0, 1), (0, 4)))


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """Ask for the kernel, in tiles of which 20 tokens are a part."""
    monkeypatch.setenv("KVMAP_TRITON", "1")
    monkeypatch.setattr(fused.Tile, "of", lambda *_: SMALL)


@pytest.fixture
def launched(monkeypatch):
    """Count what the kernel writes."""
    seen = []
    usual = fused.FusedChunk.write
    monkeypatch.setattr(
        fused.FusedChunk, "write", lambda self, out: (seen.append(out.tokens), usual(self, out))
    )
    return seen


def applied(cmap, cache, dtype=torch.float32, **given):
    first = tuple(drawn(cmap.target.geometry, cache.tokens, len(cache.positions), 2).keys[:2])
    first = tuple(tensor.to(dtype) for tensor in first)
    out = empty_cache(cmap.target.geometry, cache.positions, dtype)
    apply(cmap, cache, first, out, **given)
    return out, first


# Every combination, and every shape with every kind of heads.
CASES = [(list(SHAPES)[at % 3], options) for at, options in enumerate(COMBINATIONS)]
CASES += [("more heads", COMBINATIONS[3]), ("fewer heads", COMBINATIONS[9])]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_kernel_computes_the_formula(launched, name, options):
    """Heads of 4 to 8 channels fill a part of a step."""
    pair = shapes(name)
    cmap = made(pair, options)
    cache = drawn(pair[0], tokens=20, batch=2 if name == "fewer heads" else 1)
    out, first = applied(cmap, cache)
    check(cmap, cache, out, first)
    assert launched == [20]


@pytest.mark.parametrize("options", COMBINATIONS[-2:] + COMBINATIONS[:1], ids=str)
def test_kernel_rounds_half_precision_once(launched, options):
    pair = shapes("more heads")
    cmap = made(pair, options).to("cpu", torch.bfloat16)
    cache = drawn(pair[0], tokens=20, batch=1).to(dtype=torch.bfloat16)
    out, first = applied(cmap, cache, torch.bfloat16)
    check(cmap, cache, out, first, rtol=1e-2)
    assert launched == [20]


def test_heads_of_several_steps_are_summed_up(launched):
    """Heads of 72 channels take two steps of 32 planes, the second a part; aligned as on a GPU."""
    tables = (whole(72, 1e4), whole(40, 5e5))
    pair = tuple(
        replace(shape, head_size=size, rope=(table,) * shape.layers)
        for shape, size, table in zip(SHAPES["fewer heads"], (72, 40), tables, strict=True)
    )
    cmap = made(pair, COMBINATIONS[-1])
    cache = drawn(pair[0], tokens=20, batch=1)
    out, first = applied(cmap, cache)
    check(cmap, cache, out, first, rtol=3e-5)


@pytest.mark.parametrize("options", [COMBINATIONS[2], COMBINATIONS[11]], ids=str)
def test_chunks_join_without_a_seam(launched, monkeypatch, options):
    """The token before a chunk is the last of the one before, at its own position."""
    monkeypatch.setattr(fused, "CHUNK_TOKENS", 13)
    pair = shapes("as many heads")
    cmap, cache = made(pair, options), drawn(pair[0], tokens=20)
    cache = replace(cache, positions=cache.positions[:, :1] + torch.arange(20))
    out, first = applied(cmap, cache)
    check(cmap, cache, out, first)
    assert launched == [13, 7]


def test_what_stands_before_is_read_like_in_the_plain_engine(launched, monkeypatch):
    options = MapOptions(heads="matched", lookback=3, lookback_layers=(0, 4))
    pair = shapes("more heads")
    cmap, cache = made(pair, options), drawn(pair[0], tokens=20, batch=1)
    before = drawn(pair[0], 2, 1, seed=5)
    fused_out, _ = applied(cmap, cache, before=before)
    monkeypatch.setenv("KVMAP_TRITON", "0")
    plain, _ = applied(cmap, cache, before=before)
    torch.testing.assert_close(fused_out.keys, plain.keys)
    torch.testing.assert_close(fused_out.values, plain.values)
    assert launched == [20]


def test_kernel_writes_into_a_paged_layout(launched):
    """Tokens outermost, as engines keep their pages: only strides differ."""
    pair = shapes("as many heads")
    cmap, cache = made(pair, COMBINATIONS[-1]), drawn(pair[0], tokens=20, batch=1)
    flat = empty_cache(pair[1], cache.positions, torch.float32)
    paged = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (*flat.keys, *flat.values)]
    out = KVCache(tuple(paged[:2]), tuple(paged[2:]), cache.positions)
    first = tuple(drawn(pair[1], 20, 1, 2).keys[:2])
    apply(cmap, cache, first, out)
    check(cmap, cache, out, first)
    assert launched == [20]


@pytest.mark.parametrize("change", ["partial turns", "low rank", "mixed dtypes", "strides"])
def test_what_the_kernel_cannot_do_is_left_to_the_plain_engine(launched, change):
    pair = SHAPES["more heads"] if change == "partial turns" else shapes("more heads")
    cmap = made(pair, MapOptions(anchor=True, exact_first=True), *[change] * (change == "low rank"))
    cache = drawn(pair[0], tokens=20, batch=1)
    if change == "strides":
        keys = tuple(key.transpose(2, 3).contiguous().transpose(2, 3) for key in cache.keys)
        cache = replace(cache, keys=keys)
    dtype = torch.bfloat16 if change == "mixed dtypes" else torch.float32
    out, first = applied(cmap, cache, dtype)
    check(cmap, cache, out, first, rtol=1e-2 if change == "mixed dtypes" else 1e-5)
    assert not launched


def test_kernel_is_compiled_for_gpus_that_are_not_here():
    """Two generations: within the shared memory of their smallest, and by their matrix units."""
    script = Path(__file__).with_name("compiled.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 6
    for one in found:
        assert one["shared_bytes"] <= 99 << 10
        assert one["products"] > 0
        assert one["narrow_loads"] <= 2, "all but a bias is loaded 16 bytes at once"


def test_kernel_is_automatic_on_cuda_and_can_be_turned_off(monkeypatch):
    assert kernel_wanted(on_cuda=False)
    monkeypatch.setenv("KVMAP_TRITON", "0")
    assert not kernel_wanted(on_cuda=True)
    monkeypatch.delenv("KVMAP_TRITON")
    assert kernel_wanted(on_cuda=True)
    assert not kernel_wanted(on_cuda=False)
    monkeypatch.setattr("kvmap.engine._has_triton", lambda: False)
    assert not kernel_wanted(on_cuda=True)


@pytest.mark.parametrize("layout", test_paged.LAYOUTS)
@pytest.mark.parametrize("options", [COMBINATIONS[4], COMBINATIONS[8]], ids=str)
def test_kernel_stores_in_blocks(launched, layout, options):
    """Tokens of no slot are left out; an exact layer is copied."""
    pair = shapes("more heads")
    cmap, cache = made(pair, options), drawn(pair[0], tokens=20, batch=1)
    out, first = applied(cmap, cache)
    pages = test_paged.paged(layout, 1, 20, pair[1])
    pages.slots[0, 7] = -1
    apply(cmap, cache, first, pages)
    assert launched == [20, 20]
    test_paged.check(pages, out)
