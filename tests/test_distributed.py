"""Several processes give what one gives."""

import os
import subprocess
import sys

import pytest
import torch
from entries import moments, noise

from kvmap import pipeline
from kvmap.calibration import Calibration
from kvmap.calibration_files import SPLITS
from kvmap.collect import CollectOptions, collect
from kvmap.fit import recipe
from kvmap.moments import Rows
from kvmap.pair import Loading, TextOptions, read_text
from kvmap.ranks import Ranks, ranks


def close(one, other):
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(other.tensors[name], tensor, rtol=1e-10, atol=1e-10)


def test_one_process_is_the_first_and_has_all_shards(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with ranks() as team:
        assert team == Ranks()
        assert team.first
        assert list(team.shards(3)) == [0, 1, 2]
        assert team.agree(True)
        assert not team.agree(False)


def test_shards_are_dealt_out_whole():
    dealt = [list(Ranks(rank, 3).shards(8)) for rank in range(3)]
    assert sorted(shard for own in dealt for shard in own) == list(range(8))


@pytest.mark.parametrize("sizes", [(40, 60), (0, 100), (100, 0)])
def test_pooled_moments_are_those_of_all_rows(sizes):
    """Sums over two processes, played by two accumulators in step."""
    rows = noise(100, mean=50.0)
    first, second = (
        Rows({key: tuple(t[part] for t in layers) for key, layers in rows.entries.items()})
        for part in (slice(0, sizes[0]), slice(sizes[0], None))
    )
    whole, parts = moments(rows), [moments(first), moments(second)]
    # Each sum needs what the other has at the same moment: record both sides, then replay.
    seen: list[list[torch.Tensor]] = [[], []]
    for _ in range(100):
        before = [len(calls) for calls in seen]
        for number, fresh in enumerate((moments(first), moments(second))):
            replay(fresh, seen[number], seen[1 - number])
        if before == [len(calls) for calls in seen]:
            break
    for number, mine in enumerate(parts):
        replay(mine, seen[number], seen[1 - number])
        close(whole, mine)


def replay(mine, own, others):
    """Pool, answering each sum from what the other said, until it has not said anything yet."""

    class Stop(Exception):
        pass

    calls = iter(range(10**6))

    def add_up(tensor):
        at = next(calls)
        if at == len(own):
            own.append(tensor.clone())
        if at >= len(others):
            raise Stop
        tensor += others[at]

    try:
        mine.pool(add_up)
    except Stop:
        return


def test_two_processes_under_torchrun_fit_the_same_map(checkpoint, loaded, tmp_path):
    names = tuple(str(checkpoint(name)) for name in ("qwen3_small", "llama_default"))
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"{n} times {n} makes {n * n}" for n in range(400)))
    found = read_text(names, TextOptions(str(text), sequences=48, length=24), Loading("cpu"))
    options = CollectOptions(heads="all", joint=True)
    openers = tuple(lambda name=name: loaded(name) for name in ("qwen3_small", "llama_default"))
    alone = collect(openers, found.token_ids, tmp_path / "alone", options, found.record)
    command = (
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "kvmap", "collect", *names, "-o", str(tmp_path / "two"), "--device", "cpu"),
        *("--dataset", str(text), "--sequences", "48", "--length", "24", "-q"),
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        (sys.executable, *command), capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'two'}\n"
    pair = Calibration.open(tmp_path / "two")
    for split in SPLITS:
        close(alone.moments(split), pair.moments(split))
        close(alone.moments(split, with_head=True), pair.moments(split, with_head=True))
    same_map(alone, pair)
    assert {path.name for path in pair.path.iterdir()} == {p.name for p in alone.path.iterdir()}


def same_map(one, other):
    """Layers and ridges equal, R² to 1e-10, weights to the digits of float32.

    Moments that differ in their last digits move a solution by as much times the condition of
    its system, up to 1e10 with the smallest ridge, but only where the inputs hardly vary: what
    it predicts stays. The ridges chosen here are large, so even the weights are alike.
    """
    chosen = recipe("kvmap-matched")
    made = []
    for calibration in (one, other):
        layers = pipeline.select_layers(pipeline.splits(calibration, 4), chosen).layers
        made.append((layers, pipeline.fit_map(calibration, layers, chosen, lambda *_: None).cmap))
    assert made[0][0] == made[1][0]
    records = [cmap.provenance for _, cmap in made]
    assert records[0]["ridge"] == records[1]["ridge"]
    for split, by_kind in records[0]["r2"].items():
        assert by_kind == pytest.approx(records[1]["r2"][split], rel=1e-10)
    for mine, theirs in zip(made[0][1].layers, made[1][1].layers, strict=True):
        for kind in ("key", "value") if mine else ():
            a, b = mine.of(kind).weight, theirs.of(kind).weight
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
