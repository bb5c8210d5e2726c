"""Several processes give what one gives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import SMALL, SUPPORTED, random_model, save
from entries import moments, noise

from kvmap import models, pipeline
from kvmap.calibration import Calibration
from kvmap.calibration_files import SPLITS
from kvmap.collect import collect
from kvmap.collect_options import CollectOptions
from kvmap.collect_pair import Loading, TextOptions, read_text
from kvmap.errors import UsageError
from kvmap.fit import recipe
from kvmap.fit.choice import select_layers
from kvmap.fit.job import splits
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
        rows.pick(torch.arange(100)[part]) for part in (slice(0, sizes[0]), slice(sizes[0], None))
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


@pytest.fixture(scope="module")
def names(checkpoint):
    return tuple(str(checkpoint(name)) for name in ("qwen3_small", "llama_default"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"{n} times {n} makes {n * n}" for n in range(400)))
    return str(path)


@pytest.fixture(scope="module")
def alone(names, loaded, text, tmp_path_factory):
    """Return the calibration of one process."""
    found = read_text(names, TextOptions(text, sequences=48, length=24), Loading("cpu"))
    openers = tuple(lambda name=name: loaded(name) for name in ("qwen3_small", "llama_default"))
    out, options = tmp_path_factory.mktemp("one") / "alone", CollectOptions(heads="all", joint=True)
    return collect(openers, found.token_ids, out, options, found.record)


def under_torchrun(*command):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        (sys.executable, *start, *command),
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_two_processes_under_torchrun_fit_the_same_map(names, text, alone, tmp_path):
    command = ("-m", "kvmap", "collect", *names, "-o", str(tmp_path / "two"), "--device", "cpu")
    done = under_torchrun(*command, "--dataset", text, "--sequences", "48", "--length", "24", "-q")
    assert done.stdout == f"{tmp_path / 'two'}\n"
    pair = Calibration.open(tmp_path / "two")
    for split in SPLITS:
        close(alone.moments(split), pair.moments(split))
        close(alone.moments(split, with_head=True), pair.moments(split, with_head=True))
    same_map(alone, pair)
    assert {path.name for path in pair.path.iterdir()} == {p.name for p in alone.path.iterdir()}


def test_two_processes_that_share_models_fit_the_same_map(names, text, alone, tmp_path):
    """Stopped after a shard and resumed; models they cannot share are refused first.

    Each process multiplies a part of every product, and the parts are added up in float32: the
    rows differ in its last digits, by 5e-7 here, their moments by 2e-7 and the map's weights by
    as much times the condition of their systems, 2e-6.
    """
    config = {**SUPPORTED["llama_default"][1], "num_attention_heads": 3, "hidden_size": 48}
    odd = random_model("llama", 1, **config | {"num_key_value_heads": 3})
    unplanned = random_model("stablelm", 2, **SMALL)
    others = [str(save(m, tmp_path / m.config.model_type)) for m in (odd, unplanned)]
    script = str(Path(__file__).with_name("sharded.py"))
    done = under_torchrun(script, str(tmp_path / "two"), text, *names, *others)
    assert done.stdout.count("codes [2, 2, 130, 0]\n") == 2
    assert f"{others[0]}: found 3 KV heads for 2 processes" in done.stderr
    assert "found no tensor-parallel plan for stablelm" in done.stderr
    pair = Calibration.open(tmp_path / "two")
    assert pair.index | {"digests": alone.index["digests"]} == alone.index
    for split in SPLITS:
        mine, theirs = (found.moments(split, with_head=True).tensors for found in (alone, pair))
        assert all((theirs[n] - t).norm() <= 2e-6 * t.norm() for n, t in mine.items())
    same_map(alone, pair, 1e-6, 5e-5)
    assert {path.name for path in pair.path.iterdir()} == {p.name for p in alone.path.iterdir()}


def test_one_process_shares_no_model(checkpoint):
    with pytest.raises(UsageError, match="run `torchrun --nproc-per-node N -m kvmap collect"):
        models.load(str(checkpoint("llama_default")), "tensor-parallel")


def same_map(one, other, r2=1e-10, weights=1e-6):
    """Layers and ridges equal, R² to 1e-10, weights to the digits of float32.

    Moments that differ in their last digits move a solution by as much times the condition of
    its system, up to 1e10 with the smallest ridge, but only where the inputs hardly vary: what
    it predicts stays. The ridges chosen here are large, so even the weights are alike.
    """
    chosen = recipe("kvmap-matched")
    made = []
    for calibration in (one, other):
        layers = select_layers(splits(calibration, 4), chosen).layers
        made.append((layers, pipeline.fit_map(calibration, layers, chosen, lambda *_: None).cmap))
    assert made[0][0] == made[1][0]
    records = [cmap.provenance for _, cmap in made]
    assert records[0]["ridge"] == records[1]["ridge"]
    for split, by_kind in records[0]["r2"].items():
        assert by_kind == pytest.approx(records[1]["r2"][split], rel=r2)
    for mine, theirs in zip(made[0][1].layers, made[1][1].layers, strict=True):
        for kind in ("key", "value") if mine else ():
            a, b = mine.of(kind).weight, theirs.of(kind).weight
            torch.testing.assert_close(a, b, rtol=weights, atol=weights / 10)
