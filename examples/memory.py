"""Compare the memory that `kvmap plan` foretells with what is taken, in a process per stage.

    python examples/memory.py [--layers 6] [--heads 4] [--size 64] [--length 128]

Prints one JSON line per stage: bytes planned, bytes measured, and measured over planned. Two
models of random weights and the given cache shape are built, 16 sequences read. Measured is the
peak of the process's resident memory (Linux) beside what it held when the stage began: kvmap
loaded, each stage run once on small models, its own models and the cache to be mapped in memory.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig

from kvmap import fit
from kvmap.bench.shapes import random_map, random_model
from kvmap.calibration import Calibration
from kvmap.collect import CollectOptions, collect
from kvmap.footprint import collect_bytes, fit_bytes, use_bytes
from kvmap.mapping import CacheMap
from kvmap.models import prefill
from kvmap.pipeline import fit_map
from kvmap.plan import moments_bytes

STAGES = ("collect", "fit", "map")
SEQUENCES = 16
CPU = torch.device("cpu")
KEPT = CollectOptions(stride=1, heads="all", joint=True)


def status(name: str) -> int:
    """Return a figure of this process's memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def peak(run: Callable[[], object]) -> int:
    """Return how far resident memory rises while something runs."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    held = run()
    found = status("VmHWM") - before
    del held
    return found


def models(folder: Path, asked: argparse.Namespace, layers: int):
    """Build a source and a target with random weights."""
    width = asked.heads * asked.size
    for seed, name in enumerate(("source", "target")):
        LlamaConfig(
            num_hidden_layers=layers,
            num_attention_heads=asked.heads,
            num_key_value_heads=asked.heads,
            head_dim=asked.size,
            hidden_size=width,
            intermediate_size=width,
            vocab_size=256,
            max_position_embeddings=8192,
        ).save_pretrained(folder / name)
        yield random_model(str(folder / name), CPU, torch.float32, seed=seed)


def layers_apart(count: int) -> tuple[tuple[int, ...], ...]:
    """Return every other source layer for each target layer: nothing can be a view."""
    return (tuple(range(0, count, 2)),) * count


def run_stage(stage: str, folder: Path, asked: argparse.Namespace, layers: int) -> tuple[int, int]:
    """Return the bytes planned and measured of one stage."""
    pair = tuple(models(folder, asked, layers))
    shapes = tuple(model.signature.geometry for model in pair)
    path, chosen = folder / f"{layers}.calib", layers_apart(layers)
    recipe = fit.recipe("kvmap")
    if stage == "collect":
        ids = torch.randint(256, (SEQUENCES, asked.length))
        openers = tuple(lambda model=model: model for model in pair)
        # The models are there already, and no part of the peak.
        planned = collect_bytes(tuple((s, 0) for s in shapes), ids.shape, KEPT, 4)
        return planned, peak(lambda: collect(openers, ids, path, KEPT, {}))
    if stage == "fit":
        opened = Calibration.open(path)
        moments = moments_bytes(*shapes, KEPT.heads, KEPT.joint)
        planned = fit_bytes(recipe.options, len(chosen[0]), *shapes, moments)
        return planned, peak(lambda: fit_map(opened, chosen, recipe, lambda *_: None))
    whole = fit.recipe("paper")
    cmap = random_map(tuple(m.signature for m in pair), whole, CPU, torch.float32)
    cmap.save(folder / "map")
    cache = prefill(pair[0], torch.randint(256, (1, 2048)))[0]
    planned = use_bytes(whole, len(cmap.layers[0].source_layers), *shapes)
    planned += cache.tokens * shapes[1].kv_bytes_per_token(4)
    del cmap
    return planned, peak(lambda: CacheMap.load(folder / "map").apply(cache))


def main() -> None:
    """Run every stage in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in (("layers", 6), ("heads", 4), ("size", 64), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.stage is None:
        with tempfile.TemporaryDirectory() as folder:
            for stage in STAGES:
                command = [sys.executable, __file__, *sys.argv[1:], "--stage", stage]
                subprocess.run([*command, "--folder", folder], check=True)
        return
    run_stage(asked.stage, asked.folder, asked, 2)
    planned, measured = run_stage(asked.stage, asked.folder, asked, asked.layers)
    row = {"stage": asked.stage, "planned_bytes": planned, "measured_bytes": measured}
    print(json.dumps(row | {"ratio": round(measured / planned, 3)}), flush=True)


if __name__ == "__main__":
    main()
