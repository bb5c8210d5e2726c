"""Measure the mapping engine on a GPU at published shapes: 32,768 tokens, Qwen3 14B to 32B.

    python examples/bench_gpu.py [--pair qwen3-14b,qwen3-32b] [--tokens 32768] [--rounds 20]
        [--tiles 128x32x8x3,128x64x8x2,64x64x4x3]

Prints one JSON line per recipe: median and p95 of the map by the plain engine and by the fused
kernel (needs triton) with each tile (tokens x planes x warps x stages; the first is the
default), the largest difference between the two, FLOPs, bytes, and the shares of this GPU's
measured peaks. Weights are random; nothing is downloaded. Models are not built: the
prefill to compare with comes from

    kvmap bench --pair qwen3-14b,qwen3-32b --random-weights --recipe cachebridge --context 32768
"""

import argparse
import json
import os

import torch

from kvmap import engine
from kvmap.bench import Clock, Timing, measure_machine
from kvmap.bench.costs import map_cost
from kvmap.bench.memory import peak_bytes
from kvmap.bench.shapes import config_of, random_map, random_model
from kvmap.cache import KVCache
from kvmap.fit import recipe
from kvmap.geometry import Signature


def signature(name: str, device: torch.device) -> Signature:
    """Build one layer to learn its RoPE, and describe the whole."""
    from dataclasses import replace

    one = random_model(name, device, torch.bfloat16, depth=1).signature
    layers = config_of(name).num_hidden_layers
    geometry = replace(one.geometry, layers=layers, rope=one.geometry.rope * layers)
    return replace(one, geometry=geometry)


def source_cache(side: Signature, tokens: int, device: torch.device) -> KVCache:
    """Draw a cache [1, H, T, D] per layer."""
    geometry = side.geometry
    shape = (1, geometry.kv_heads, tokens, geometry.head_size)
    draw = lambda: torch.randn(shape, device=device, dtype=torch.bfloat16)  # noqa: E731
    keys, values = (tuple(draw() for _ in range(geometry.layers)) for _ in range(2))
    return KVCache(keys, values, torch.arange(tokens, device=device)[None])


def measured(run, rounds: int, clock: Clock) -> Timing:
    """Warm up three times, then time."""
    for _ in range(3):
        run()
    return Timing(tuple(clock.timed(run)[1] for _ in range(rounds)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pair", default="qwen3-14b,qwen3-32b")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--recipes", default="cachebridge,kvmap-matched,paper")
    parser.add_argument("--tiles", default="128x32x8x3,128x64x8x2,64x64x4x3,128x32x4x3")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here; this script measures nothing else")
    from kvmap.engine.fused import Tile  # which needs triton

    device = torch.device("cuda")
    clock = Clock(device)
    machine = measure_machine(clock, torch.bfloat16)
    sides = tuple(signature(name, device) for name in asked.pair.split(","))
    cache = source_cache(sides[0], asked.tokens, device)
    for name in asked.recipes.split(","):
        cmap = random_map(sides, recipe(name), device, torch.bfloat16)
        plain, fused = (engine.allocate(cmap.target.geometry, cache) for _ in range(2))
        report = {"recipe": name, "tokens": asked.tokens, "machine": machine.to_json()}
        first = tuple(torch.randn_like(plain.keys[0]) for _ in range(2))
        for label in ("plain", *asked.tiles.split(",")):
            os.environ["KVMAP_TRITON"] = "0" if label == "plain" else "1"
            if label != "plain":
                tile = Tile(*map(int, label.split("x")))
                Tile.of = lambda *_, tile=tile: tile
            out = plain if label == "plain" else fused
            run = lambda c=cmap, o=out, f=first: c.apply(cache, f, o)  # noqa: E731
            timing = measured(run, asked.rounds, clock)
            report[label] = timing.to_json() | map_cost(cmap, asked.tokens, 2).shares(
                timing.median, machine
            )
            report[label]["extra_bytes"] = peak_bytes(run, device)
        report["largest_difference"] = max(
            (a.float() - b.float()).abs().max().item()
            for a, b in zip((*plain.keys, *plain.values), (*fused.keys, *fused.values), strict=True)
        )
        print(json.dumps(report))


if __name__ == "__main__":
    main()
