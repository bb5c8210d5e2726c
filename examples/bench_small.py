"""Time a small map and its fit beside the plain way, which is one regression for each head.

    python examples/bench_small.py [--cpu-time] [--rounds N]

4 source and 6 target layers, 2 KV heads × 32, k = 2, float32, random entries; 64 sequences of 256
tokens; one thread. Prints medians of rounds in which both ways run one after the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.bench.clock import Clock, timings
from kvmap.cache import KVCache
from kvmap.calibration_files import Scope, empty_moments
from kvmap.chosen import near_layers
from kvmap.columns import KINDS, Block, entry_sides
from kvmap.fit import Splits, with_assignment
from kvmap.fit.closed_form import fit_closed_form
from kvmap.geometry import Geometry, RopeTable, Signature
from kvmap.map_options import MapOptions, input_blocks
from kvmap.mapping import CacheMap
from kvmap.moments import Moments, Rows
from kvmap.rope import rotate, strip

HEADS, SIZE, RIDGE = 2, 32, 1e-2
TRAIN, HELD_OUT = 48 * 256, 16 * 256
CHUNKS = (64, 256)
AGAIN = 10


def geometry(layers: int, theta: float) -> Geometry:
    """Describe a made-up model."""
    table = RopeTable(tuple(theta ** (-2 * i / SIZE) for i in range(SIZE // 2)))
    return Geometry(
        layers, HEADS, SIZE, HEADS, HEADS * SIZE, 1000, 4096, "made-up", (table,) * layers
    )


SOURCE, TARGET = geometry(4, 1e4), geometry(6, 1e6)
CHOSEN = tuple(near_layers(at, TARGET.layers, SOURCE.layers, 2) for at in range(TARGET.layers))


def moments(options: MapOptions, count: int, seed: int) -> Moments:
    """Accumulate the moments of random rows."""
    generator = torch.Generator().manual_seed(seed)
    entries = {
        (side, kind): {
            at: torch.randn(count, shape.kv_heads, SIZE, generator=generator) for at in layers
        }
        for side, shape, layers in entry_sides(SOURCE, TARGET, options.lookback_layers)
        for kind in KINDS
    }
    made = empty_moments(SOURCE, TARGET, Scope(options.heads, options.mixed))
    made.update(Rows(entries))
    return made


def cache(tokens: int) -> KVCache:
    """Draw a source's cache."""
    generator = torch.Generator().manual_seed(tokens)
    keys, values = (
        tuple(
            torch.randn(1, HEADS, tokens, SIZE, generator=generator) for _ in range(SOURCE.layers)
        )
        for _ in KINDS
    )
    return KVCache(keys, values, torch.arange(tokens)[None])


@dataclass(frozen=True)
class Case:
    """One kind of map: its moments, and the map that is fitted from them."""

    options: MapOptions
    splits: Splits
    cmap: CacheMap

    @classmethod
    def of(cls, heads: str) -> Case:
        """Fit a map."""
        options = with_assignment(MapOptions(heads=heads), SOURCE, TARGET)
        splits = Splits(moments(options, TRAIN, 0), moments(options, HELD_OUT, 1), SOURCE, TARGET)
        sides = (
            Signature(name, None, name, name, "", "", "float32", shape)
            for name, shape in (("source", SOURCE), ("target", TARGET))
        )
        return cls(options, splits, CacheMap(*sides, fit(splits, options), options))


def fit(splits: Splits, options: MapOptions) -> tuple:
    """Fit as `kvmap fit` does, with R² on both splits."""
    return fit_closed_form(splits, CHOSEN, options, RIDGE)[0]


def plain_fit(case: Case) -> dict[tuple[int, str, int], tuple[Tensor, Tensor]]:
    """Solve one regression for each layer, kind and head, with R² on both splits."""
    found = {}
    for index, kind, head in places():
        own = None if case.options.heads == "all" else head
        inputs = input_blocks(case.options, CHOSEN[index], kind, own, (HEADS, HEADS))
        train, unseen = (
            part.covariance(inputs, [Block("target", kind, index, head)])
            for part in (case.splits.train, case.splits.held_out)
        )
        penalty = RIDGE * train.gram.diagonal().mean() * torch.eye(len(train.gram))
        weight = torch.linalg.solve(train.gram + penalty, train.cross)
        for part in (train, unseen):
            error = part.output_square - 2 * (weight * part.cross).sum(0)
            error = error + (weight * (part.gram @ weight)).sum(0)
            float(1 - error.sum() / part.output_square.sum())
        bias = train.output_mean - train.input_mean @ weight
        found[index, kind, head] = weight.float(), bias.float()
    return found


def plain_map(
    case: Case, weights: dict[tuple[int, str, int], tuple[Tensor, Tensor]], read: KVCache
) -> dict[tuple[int, str, int], Tensor]:
    """Map with one product for each layer, kind and head, inputs stripped for every layer."""
    made = {}
    for index in range(TARGET.layers):
        for kind in KINDS:
            parts = [
                strip(read.keys[s], read.positions, SOURCE.rope[s])
                if kind == "key"
                else read.values[s]
                for s in CHOSEN[index]
            ]
            for head in range(HEADS):
                heads = range(HEADS) if case.options.heads == "all" else (head,)
                x = torch.cat([part[:, h] for part in parts for h in heads], -1)
                weight, bias = weights[index, kind, head]
                y = (x @ weight + bias)[:, None]
                made[index, kind, head] = (
                    rotate(y, read.positions, TARGET.rope[index]) if kind == "key" else y
                )
    return made


def places() -> Iterable[tuple[int, str, int]]:
    """Yield layer, kind and head of all that is predicted."""
    return ((i, k, h) for i in range(TARGET.layers) for k in KINDS for h in range(HEADS))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds")
    parser.add_argument("--rounds", type=int, default=25)
    given = parser.parse_args()
    torch.set_num_threads(1)
    clock = Clock(torch.device("cpu"), given.cpu_time)
    print(f"torch {torch.__version__}, one thread; ms, medians of {given.rounds}", flush=True)
    for heads in ("all", "matched"):
        case = Case.of(heads)
        weights = plain_fit(case)
        ways: dict[str, tuple[Callable, Callable, int]] = {
            "fit": (lambda c=case: fit(c.splits, c.options), lambda c=case: plain_fit(c), 1)
        }
        for tokens in CHUNKS:
            read = cache(tokens)
            ways[f"map {tokens}"] = (
                lambda c=case, r=read: c.cmap.apply(r),
                lambda c=case, w=weights, r=read: plain_map(c, w, r),
                AGAIN,
            )
            check(case.cmap.apply(read), plain_map(case, weights, read))

        def one_round(ways=ways) -> dict[str, float]:
            return {
                f"{name} {way}": clock.timed(lambda r=run, n=times: [r() for _ in range(n)])[1]
                / times
                for name, (*both, times) in ways.items()
                for way, run in zip(("kvmap", "plain"), both, strict=True)
            }

        measured = timings(one_round, budget=0.0, repeats=given.rounds)
        for name in ways:
            ours, plain = (1e3 * measured[f"{name} {way}"].median for way in ("kvmap", "plain"))
            print(f"{heads:8} {name:8} {ours:8.2f}   plain {plain:8.2f}   {plain / ours:.1f}x")


def check(found: KVCache, wanted: dict[tuple[int, str, int], Tensor]) -> None:
    """See that both ways compute the same."""
    for (index, kind, head), tensor in wanted.items():
        mine = (found.keys if kind == "key" else found.values)[index][:, head : head + 1]
        torch.testing.assert_close(mine, tensor, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
