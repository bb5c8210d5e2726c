"""The fused kernel in triton's interpreter against the plain engine."""

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
os.environ["TRITON_INTERPRET"] = "1"

from test_engine import SHAPES, check, drawn, made

from kvmap import triton_map
from kvmap.engine import empty_cache
from kvmap.geometry import RopeTable
from kvmap.mapping import MapOptions


def whole(size: int, theta: float) -> RopeTable:
    """Turn all channels, as the kernel requires."""
    return RopeTable(tuple(theta ** (-i / (size // 2)) for i in range(size // 2)), 1.25)


def shapes(name: str):
    from dataclasses import replace

    source, target = SHAPES[name]
    return (
        replace(source, rope=(whole(source.head_size, 1e4), None) * 2 + (None,)),
        replace(target, rope=(whole(target.head_size, 5e5),) * target.layers),
    )


CASES = [(name, torch.float32) for name in SHAPES] + [("more heads", torch.bfloat16)]


@pytest.mark.parametrize("heads", ["all", "matched"])
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_kernel_computes_the_formula(monkeypatch, name, heads, dtype):
    """Tiles are partial: 20 tokens in tiles of 16, and heads of 4 to 8 channels."""
    monkeypatch.setattr(triton_map, "TOKENS", 16)
    pair = shapes(name)
    cmap = made(pair, MapOptions(heads=heads)).to("cpu", dtype)
    batch = 2 if name == "fewer heads" else 1
    cache = drawn(pair[0], tokens=20, batch=batch).to(dtype=dtype)
    assert triton_map.usable(cmap)
    out = empty_cache(pair[1], cache.positions, dtype)
    triton_map.apply(cmap, cache, out)
    check(cmap, cache, out, None, rtol=1e-5 if dtype == torch.float32 else 2e-2)


def test_kernel_writes_into_a_paged_layout(monkeypatch):
    """Tokens outermost, as engines keep their pages: only strides differ."""
    monkeypatch.setattr(triton_map, "TOKENS", 16)
    pair = shapes("as many heads")
    cmap, cache = made(pair, MapOptions(heads="matched")), drawn(pair[0], tokens=20, batch=1)
    out = empty_cache(pair[1], cache.positions, torch.float32)
    paged = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (*out.keys, *out.values)]
    out = type(out)(tuple(paged[:3]), tuple(paged[3:]), out.positions)
    triton_map.apply(cmap, cache, out)
    check(cmap, cache, out, None)


@pytest.mark.parametrize("changes", [{"joint": True}, {"anchor": True, "exact_first": True}])
def test_maps_that_the_kernel_cannot_do_are_left_to_the_engine(changes):
    assert not triton_map.usable(made(shapes("more heads"), MapOptions(**changes)))
    assert not triton_map.usable(made(SHAPES["more heads"], MapOptions()))


def test_engine_takes_the_kernel_when_asked(monkeypatch):
    pair = shapes("fewer heads")
    cmap, cache = made(pair, MapOptions()), drawn(pair[0])
    used = []
    monkeypatch.setenv("KVMAP_TRITON", "1")
    monkeypatch.setattr(triton_map, "apply", lambda *_: used.append(1))
    cmap.apply(cache)
    assert used == [1]
