"""Compare the memory that `kvmap plan` foretells with what is taken, in a process per stage.

    python examples/memory.py [--layers 6] [--heads 4] [--size 64] [--length 128]

Prints one JSON line per stage: bytes planned, bytes measured, and measured over planned. Two
models of random weights and the given cache shape are built, 16 sequences read. Measured is the
peak of the process's resident memory (Linux) beside what it held when the stage began: kvmap
loaded, each stage run once on small models, and what the stage is given. It needs memory to
spare: pages of files that the system takes back are not seen.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

import torch
from transformers import LlamaConfig

from kvmap import fit, models, pipeline
from kvmap.bench.shapes import config_of, random_map, random_model
from kvmap.calibration import Calibration
from kvmap.collect import collect
from kvmap.collect_options import CollectOptions
from kvmap.collect_pair import Loading
from kvmap.columns import first_and_middle
from kvmap.fit.job import weighted
from kvmap.fit_stages import FitSize, stages
from kvmap.footprint import collect_bytes, use_bytes
from kvmap.mapping import CacheMap
from kvmap.models.configs import shape_of
from kvmap.plan import moments_bytes
from kvmap.plan_fit import model_size

SEQUENCES = 16
CPU = torch.device("cpu")
KEPT = CollectOptions(stride=1, heads="all", joint=True)
MATCHED = replace(KEPT, heads="matched")
# Steps after which a polish takes no more.
STEPS = 4

Stage = tuple[int, int]


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


class Pair:
    """Two models of random weights in a folder, each built when asked for."""

    def __init__(self, folder: Path, asked: argparse.Namespace, layers: int) -> None:
        """Write their configs."""
        self.folder, self.layers, self.length = folder, layers, asked.length
        width = asked.heads * asked.size
        names = [str(folder / name) for name in ("source", "target")]
        for name in names:
            LlamaConfig(
                num_hidden_layers=layers,
                num_attention_heads=2 * asked.heads,
                num_key_value_heads=asked.heads,
                head_dim=asked.size,
                hidden_size=width,
                intermediate_size=width,
                vocab_size=asked.vocabulary,
                max_position_embeddings=8192,
                tie_word_embeddings=True,
            ).save_pretrained(name)
        self.openers = tuple(
            partial(random_model, name, CPU, torch.float32, seed=seed)
            for seed, name in enumerate(names)
        )
        configs = [config_of(name) for name in names]
        self.shapes = tuple(map(shape_of, configs))
        self.sizes = tuple(model_size(config, Loading("cpu", "float32")) for config in configs)

    def collected(self, options: CollectOptions) -> Calibration:
        """Collect from both, anew."""
        ids = torch.randint(256, (SEQUENCES, self.length))
        path = self.folder / f"{self.layers}.calib"
        return collect(self.openers, ids, path, options, {}, force=True)

    def job(self, recipe: fit.Recipe, options: CollectOptions) -> fit.Job:
        """Return a fit to do, of a calibration that is made for it."""
        recipe = fit.with_lookback(recipe, first_and_middle(self.shapes[0]))
        made = replace(recipe, options=fit.with_assignment(recipe.options, *self.shapes))
        # Others for each layer, and apart: none is a view of the moments, or serves two.
        count = len(range(0, self.layers, 2))
        rows = [row for row in combinations(range(self.layers), count) if row[-1] - row[0] >= count]
        chosen = [(rows or [(0,)])[at % max(len(rows), 1)] for at in range(self.layers)]
        return fit.Job(self.collected(options), tuple(chosen), made, self.openers, lambda *_: None)

    def planned(self, job: fit.Job, options: CollectOptions) -> dict[str, int]:
        """Return the bytes that each stage of a fit would take."""
        moments = moments_bytes(*self.shapes, options.scope)
        grid, k = (SEQUENCES, self.length), len(job.layers[0])
        size = FitSize(job.recipe, k, self.shapes, self.sizes, grid, options, moments, 4)
        return {row["stage"]: row["peak_bytes"] for row in stages(size, rate=1.0)}


def collecting(pair: Pair, options: CollectOptions) -> Stage:
    """Return the bytes planned and measured of a collection."""
    sides = ((s, size.parameters) for s, size in zip(pair.shapes, pair.sizes, strict=True))
    planned = collect_bytes(tuple(sides), (SEQUENCES, pair.length), options, 4)
    return planned, peak(lambda: pair.collected(options))


def fitting(pair: Pair) -> Stage:
    """Return those of the closed form: all heads, joint."""
    job = pair.job(fit.recipe("kvmap"), KEPT)
    return pair.planned(job, KEPT)["closed form"], peak(lambda: fit.METHODS["closed-form"](job))


def weighting(pair: Pair) -> Stage:
    """Return those of the moments of weighted rows."""
    job = pair.job(replace(fit.recipe("kvmap-matched"), weights="attention"), MATCHED)
    return pair.planned(job, MATCHED)["row weights"], peak(lambda: weighted(job))


def bending(pair: Pair) -> Stage:
    """Return those of the closed form and networks beside it."""
    job = pair.job(replace(fit.recipe("kvmap-matched"), method="residual"), MATCHED)
    return max(pair.planned(job, MATCHED).values()), peak(lambda: fit.METHODS["residual"](job))


def polishing(pair: Pair, name: str, options: CollectOptions) -> Stage:
    """Return those of a polish, whose map is there already."""
    job = pair.job(replace(fit.recipe(name), polish=STEPS), options)
    layers, _ = fit.METHODS["closed-form"](job)
    cmap = CacheMap(job.calibration.source, job.calibration.target, layers, job.recipe.options)
    job.calibration.drop_moments()
    planned = pair.planned(job, options)["polish"] - 4 * cmap.parameters
    return planned, peak(lambda: pipeline.polished(job, cmap))


def mapping(pair: Pair) -> Stage:
    """Return those of loading a map and mapping a cache that is there."""
    recipe = fit.recipe("paper")
    loaded = [opener() for opener in pair.openers]
    cmap = random_map(tuple(one.signature for one in loaded), recipe, CPU, torch.float32)
    cmap.save(pair.folder / "map")
    cache = models.prefill(loaded[0], torch.randint(256, (1, 2048)))[0]
    planned = use_bytes(recipe, len(cmap.layers[0].source_layers), *pair.shapes)
    planned += cache.tokens * pair.shapes[1].kv_bytes_per_token(4)
    del cmap
    return planned, peak(lambda: CacheMap.load(pair.folder / "map").apply(cache))


STAGES = {
    "collect": partial(collecting, options=KEPT),
    "collect --no-moments": partial(collecting, options=replace(KEPT, moments=False)),
    "fit": fitting,
    "row weights": weighting,
    "networks": bending,
    "polish, all heads": partial(polishing, name="kvmap-max", options=KEPT),
    "polish, matched heads": partial(polishing, name="kvmap-matched", options=MATCHED),
    "map": mapping,
}


def main() -> None:
    """Run every stage in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in (("layers", 6), ("heads", 4), ("size", 64), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--only", choices=STAGES, nargs="*", default=list(STAGES))
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.stage is None:
        with tempfile.TemporaryDirectory() as folder:
            for stage in asked.only:
                command = [sys.executable, __file__, *sys.argv[1:], "--stage", stage]
                subprocess.run([*command, "--folder", folder], check=True)
        return
    small = argparse.Namespace(**vars(asked) | {"vocabulary": 256})
    STAGES[asked.stage](Pair(asked.folder, small, 2))
    planned, measured = STAGES[asked.stage](Pair(asked.folder, asked, asked.layers))
    row = {"stage": asked.stage, "planned_bytes": planned, "measured_bytes": measured}
    print(json.dumps(row | {"ratio": round(measured / planned, 3)}), flush=True)


if __name__ == "__main__":
    main()
