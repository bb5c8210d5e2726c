"""The memory that is foretold, beside what is taken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from entries import geometry

from kvmap import artifacts
from kvmap.bench.memory import peak_bytes
from kvmap.collect_options import CollectOptions
from kvmap.fit import Recipe
from kvmap.footprint import collect_bytes, fit_bytes, use_bytes
from kvmap.map_options import MapOptions

SCRIPT = Path(__file__).parent.parent / "examples" / "memory.py"
SHAPES = (geometry(6, 2, 8), geometry(5, 4, 6, theta=5e5))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_what_is_planned_is_what_is_taken():
    """Within a tenth, of a few hundred megabytes: beside less, a process's own noise shows."""
    shape = ("--layers", "4", "--size", "48", "--length", "64")
    stages = ("collect", "fit", "map")
    done = subprocess.run(
        [sys.executable, SCRIPT, *shape, "--only", *stages],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert tuple(row["stage"] for row in rows) == stages
    for row in rows[:2]:
        assert row["ratio"] == pytest.approx(1, abs=0.1), row
    # A map of a few megabytes: never more than planned, but for that noise.
    assert rows[2]["measured_bytes"] < 1.1 * rows[2]["planned_bytes"] + 4e6, rows[2]


def test_checking_numbers_makes_no_copy_of_them(tmp_path):
    tensor = torch.zeros(6000, 1000)
    write = lambda: artifacts.write(tmp_path / "x", "dump", {"x": tensor}, {})  # noqa: E731
    assert peak_bytes(write, torch.device("cpu")) < tensor.nbytes / 2


def test_models_moments_and_rows_are_counted_once_each():
    models = tuple((shape, 10**6) for shape in SHAPES)
    full = CollectOptions(stride=1, heads="all", joint=True)
    bare = CollectOptions(stride=1, moments=False)
    both = collect_bytes(models, (8, 64), bare, 4)
    assert both - collect_bytes(models, (8, 64), bare, 4, together=False) == 4 * 10**6
    assert collect_bytes(models, (8, 64), full, 4) > both
    assert collect_bytes(models, (64, 64), full, 4) == collect_bytes(models, (320, 64), full, 4)


@pytest.mark.parametrize("options", [MapOptions(), MapOptions(heads="matched", joint=True)])
def test_more_layers_take_more_memory_until_there_are_none(options):
    fits = [fit_bytes(options, k, *SHAPES, moments=1000) for k in (1, 2, 6, 9)]
    uses = [use_bytes(Recipe(k, 1.0, options), k, *SHAPES) for k in (1, 2, 5)]
    assert fits == sorted(fits)
    assert uses == sorted(uses)
    assert fits[2] == fits[3]
