"""A map writes into a serving engine's blocks what it writes into a cache."""

from dataclasses import replace

import pytest
import torch
from entries import geometry
from test_engine import drawn, made

from kvmap import engine
from kvmap.engine import PagedCache
from kvmap.errors import UsageError
from kvmap.map_options import MapOptions

SOURCE, TARGET = geometry(5, 2, 4), geometry(3, 2, 6)
BLOCKS, SIZE = 12, 4
OPTIONS = MapOptions(joint=True, anchor=True, exact_first=True, lookback=2, lookback_layers=(0, 3))


def beside(shape):
    """Keys beside values, a block's heads before its tokens."""
    memory = [
        torch.full((BLOCKS, shape.kv_heads, SIZE, 2 * shape.head_size), 9.0)
        for _ in range(shape.layers)
    ]
    return zip(*(one.split(shape.head_size, -1) for one in memory), strict=True)


def tokens_first(shape):
    """Keys and values apart, a block's tokens before its heads."""
    draw = lambda: torch.full((BLOCKS, SIZE, shape.kv_heads, shape.head_size), 9.0)  # noqa: E731
    return [tuple(draw().transpose(1, 2) for _ in range(shape.layers)) for _ in range(2)]


LAYOUTS = {"keys beside values": beside, "tokens before heads": tokens_first}


def paged(layout, batch, tokens, shape=TARGET):
    """Return blocks in no order, of which every token of a sequence has one slot."""
    order = torch.randperm(BLOCKS * SIZE, generator=torch.Generator().manual_seed(3))
    keys, values = LAYOUTS[layout](shape)
    return PagedCache(tuple(keys), tuple(values), order[: batch * tokens].view(batch, tokens))


def check(pages, wanted):
    """Compare what lies in the slots with a cache, and see that nothing else was touched."""
    slots = pages.slots
    block, place = slots.clamp_min(0) // SIZE, slots.clamp_min(0) % SIZE
    written = slots >= 0
    for found, one in zip(
        (*pages.keys, *pages.values), (*wanted.keys, *wanted.values), strict=True
    ):
        torch.testing.assert_close(
            found[block, :, place][written], one.transpose(1, 2)[written], rtol=1e-5, atol=1e-6
        )
        rest = torch.ones(BLOCKS, SIZE, dtype=torch.bool)
        rest[block[written], place[written]] = False
        assert (found.transpose(1, 2)[rest] == 9.0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_hold_what_a_cache_would(layout, monkeypatch):
    """In chunks as well, and two tokens of no slot are left out."""
    monkeypatch.setitem(engine.workspace.MOST_TOKENS, "cpu", 4)
    monkeypatch.setattr(engine.workspace, "LEAST_TOKENS", 1)
    cmap, cache = made((SOURCE, TARGET), OPTIONS), drawn(SOURCE)
    first = tuple(drawn(TARGET, seed=2).keys[:2])
    pages = paged(layout, *cache.positions.shape)
    pages.slots[0, :2] = -1
    assert cmap.apply(cache, first, pages) is pages
    check(pages, cmap.apply(cache, first))


def test_a_cache_that_is_there_can_be_stored():
    cache = drawn(TARGET)
    pages = paged("keys beside values", *cache.positions.shape)
    pages.store(cache)
    check(pages, cache)
    with pytest.raises(UsageError, match="expected 5 as the cache has"):
        pages.store(drawn(SOURCE))
    with pytest.raises(UsageError, match=r"found slots \[2, 9\] torch.int64, expected \[2, 5\]"):
        pages.store(cache.slice(0, 5))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: replace(p, keys=p.keys[:-1]), "2 layers of keys and 3 of values, expected 3"),
        (lambda p: replace(p, keys=tuple(k[..., :-1] for k in p.keys)), "found blocks of shape"),
        (
            lambda p: replace(p, values=tuple(v.to(torch.float8_e4m3fn) for v in p.values)),
            "16 bits",
        ),
        (lambda p: replace(p, keys=(*p.keys[1:], p.keys[0][:-1])), "differ in number, size"),
        (lambda p: replace(p, values=p.keys), "one over the other"),
        (lambda p: replace(p, keys=p.keys[:1] * 3), "blocks lie one over"),
        (
            lambda p: replace(p, keys=tuple(k[:1].expand(BLOCKS, -1, -1, -1) for k in p.keys)),
            "over the other; give memory",
        ),
        (lambda p: replace(p, slots=p.slots[:, :-1]), r"found slots \[2, 8\]"),
        (lambda p: replace(p, slots=p.slots.int()), "torch.int32, expected"),
        (lambda p: replace(p, slots=p.slots + 40), "expected less than 48"),
        (lambda p: replace(p, slots=p.slots * 0), "two tokens have one slot"),
    ],
)
def test_blocks_that_are_not_the_target_s_are_refused(change, said):
    cmap, cache = made((SOURCE, TARGET), MapOptions()), drawn(SOURCE)
    pages = change(paged("keys beside values", *cache.positions.shape))
    with pytest.raises(UsageError, match=said):
        cmap.apply(cache, out=pages)
