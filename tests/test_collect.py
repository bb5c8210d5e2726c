"""What a calibration holds, and that an interrupted run ends as if it never was."""

import copy
import dataclasses
import os
import shutil
import signal
import stat
import warnings
from dataclasses import replace
from itertools import product

import numpy as np
import oracles
import pytest
import torch
from conftest import token_ids

from kvmap import artifacts
from kvmap import collect as module
from kvmap.calibration import Calibration
from kvmap.calibration_files import write_index
from kvmap.clearing import clear
from kvmap.collect import collect
from kvmap.collect_options import CollectOptions, held_out_mask
from kvmap.columns import BACK, Block
from kvmap.errors import UsageError
from kvmap.fit import recipe, with_assignment, with_lookback
from kvmap.fit.closed_form import regressions
from kvmap.fit.job import splits
from kvmap.fit_pair import FitRequest, fit_calibration
from kvmap.merge import merge
from kvmap.pipeline import fit_map
from kvmap.ridge import solve

PAIR = ("qwen3_small", "llama_llama3")
SEQUENCES, LENGTH, STRIDE = 11, 24, 3
OPTIONS = CollectOptions(
    stride=STRIDE, held_out=0.3, native_head=4, heads="all", joint=True, batch=2, shard=4
)
TEXT = {"dataset": "random", "seed": 0}
KEPT = range(0, LENGTH, STRIDE)


@pytest.fixture
def run(loaded):
    """Return a function that collects PAIR into a folder."""

    def go(out, options=OPTIONS, ids=None, text=TEXT, pair=PAIR, **rest) -> Calibration:
        openers = tuple(lambda name=name: loaded(name) for name in pair)
        ids = token_ids(SEQUENCES, LENGTH) if ids is None else ids
        return collect(openers, ids, out, options, text, **rest)

    return go


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def native_rows(native):
    """Return, by (side, kind), per layer the native content [N, T, H * D]."""
    found = {}
    for side, name in zip(("source", "target"), PAIR, strict=True):
        ids = token_ids(SEQUENCES, LENGTH)
        with oracles.recording_content_keys(native(name)) as keys:
            _, values = oracles.native_cache(native(name), ids)
        ordered = [keys[layer] for layer in range(len(keys))]
        for kind, tensors in (("key", ordered), ("value", values)):
            flat = [tensor.transpose(1, 2).flatten(2) for tensor in tensors]
            found[side, kind] = [tensor.double().numpy() for tensor in flat]
    return found


def test_dump_is_the_models_own_content(run, native_rows, tmp_path):
    """Every third token of every sequence, in order, with its position and sequence."""
    made = run(tmp_path / "c")
    shards = list(made.shards())
    assert [len(position) for _, position, _ in shards] == [32, 32, 24]
    position, sequence = (torch.cat([shard[i] for shard in shards]) for i in (1, 2))
    assert position.tolist() == [*KEPT] * SEQUENCES
    assert sequence.tolist() == [s for s in range(SEQUENCES) for _ in KEPT]
    for name, layers in native_rows.items():
        for layer, expected in enumerate(layers):
            found = torch.cat([shard[0].entries[name][layer] for shard in shards]).flatten(1)
            kept = expected[:, ::STRIDE].reshape(len(found), -1)
            np.testing.assert_allclose(found.numpy(), kept, atol=2e-5)


@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_moments_are_those_of_the_rows(run, native_rows, tmp_path, split, with_head):
    """Train and held-out sequences apart; the first four tokens count only when asked for."""
    made = run(tmp_path / "c")
    mask = held_out_mask(SEQUENCES, OPTIONS.held_out).numpy()
    members = mask if split == "held_out" else ~mask
    positions = [p for p in KEPT if with_head or p >= 4]
    inputs = [Block("source", kind, 1, head) for kind in ("key", "value") for head in (0, 1)]
    outputs = [Block("target", "value", 2, 3), Block("target", "key", 3, 0)]

    def columns(block):
        size = {"source": 16, "target": 24}[block.side]
        chosen = native_rows[block.side, block.kind][block.layer][members][:, positions]
        return chosen[..., block.head * size : (block.head + 1) * size].reshape(-1, size)

    x, y = (np.concatenate([columns(b) for b in side], 1) for side in (inputs, outputs))
    found = made.moments(split, with_head).covariance(inputs, outputs)
    gram, cross = oracles.covariance(x, y)
    assert found.count == len(x) == members.sum() * len(positions)
    np.testing.assert_allclose(found.gram.numpy(), gram, atol=1e-4 * np.abs(gram).max())
    np.testing.assert_allclose(found.cross.numpy(), cross, atol=1e-4 * np.abs(cross).max())
    np.testing.assert_allclose(found.input_mean.numpy(), x.mean(0), atol=1e-5)


@pytest.mark.parametrize("with_head", [False, True])
def test_moments_follow_from_the_dump_alone(run, tmp_path, with_head):
    """To 1e-10: the same rows, added in the same or another order."""
    both = run(tmp_path / "both")
    dump = run(tmp_path / "dump", dataclasses.replace(OPTIONS, moments=False))
    assert not (tmp_path / "dump" / "moments.safetensors").exists()
    for split in ("train", "held_out"):
        one, other = (made.moments(split, with_head).tensors for made in (both, dump))
        for name in one:
            scale = one[name].abs().max().clamp_min(1e-30)
            assert (one[name] - other[name]).abs().max() <= 1e-10 * scale, name


def test_without_a_dump_no_rows_stay_and_moments_are_the_same_bytes(run, tmp_path):
    run(tmp_path / "both")
    run(tmp_path / "lean", dataclasses.replace(OPTIONS, dump=False))
    lean, both = contents(tmp_path / "lean"), contents(tmp_path / "both")
    assert not any(name.startswith(("source-", "target-")) for name in lean)
    assert lean["moments.safetensors"] == both["moments.safetensors"]


def test_models_one_after_the_other_give_the_same_bytes(run, tmp_path):
    run(tmp_path / "together")
    run(tmp_path / "apart", together=False)
    assert contents(tmp_path / "apart") == contents(tmp_path / "together")


def test_running_again_gives_the_same_bytes(run, tmp_path):
    run(tmp_path / "one")
    run(tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_batches_do_not_matter(run, tmp_path, batch):
    """But for rounding: matrix products of other shapes add in another order."""
    one = run(tmp_path / "one").moments("train").tensors
    options = dataclasses.replace(OPTIONS, batch=batch)
    other = run(tmp_path / "other", options).moments("train").tensors
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("sequences", "share", "count"),
    [(10, 0.1, 1), (500, 0.1, 50), (11, 0.3, 3), (2, 0.9, 1), (3, 0.01, 1)],
)
def test_held_out_sequences_are_a_spread_share(sequences, share, count):
    mask = held_out_mask(sequences, share)
    assert mask.sum() == count
    gaps = mask.nonzero().flatten().diff()
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1


def test_index_tells_what_was_done(run, tmp_path):
    made = Calibration.open(run(tmp_path / "c").path)
    assert made.tokens == SEQUENCES * LENGTH
    assert made.index["text"] == TEXT
    assert [side.geometry.layers for side in (made.source, made.target)] == [3, 4]
    assert made.bytes == sum(map(len, contents(tmp_path / "c").values()))
    assert (
        made.token_ids("held_out").tolist()
        == token_ids(SEQUENCES, LENGTH)[held_out_mask(SEQUENCES, 0.3)].tolist()
    )
    assert len(made.token_ids("train")) == 8


def test_what_holds_text_is_for_its_owner_only(run, tmp_path):
    run(tmp_path / "c")
    for path in (tmp_path / "c").iterdir():
        if path.name != "moments.safetensors":
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path.name


# --- interruption


LITTLE = {"ids": token_ids(4, 9), "pair": ("qwen3_small", "llama_default")}
LITTLE_OPTIONS = dataclasses.replace(OPTIONS, shard=2, heads="matched", joint=False)


def killed_after(step: int, action) -> bool:
    """Run `action` in a child that is killed after its `step`-th change of the folder.

    Returns:
        Whether the child was killed; False where it ended before that many changes.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork, with no other thread at work
        child = os.fork()
    if child == 0:
        count = 0

        def counting(original):
            def change(*args, **kwargs):
                nonlocal count
                count += 1
                result = original(*args, **kwargs)
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return change

        for name in ("replace", "unlink"):
            setattr(os, name, counting(getattr(os, name)))
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.fixture
def quick(monkeypatch):
    """Leave out what a kill cannot tell apart: a process's end loses no file written."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize(("dump", "stride"), [(False, 1), (True, 3)])
def test_killed_anywhere_it_resumes_to_the_same_bytes(
    run, tmp_path, monkeypatch, quick, dump, stride
):
    """SIGKILL after every file that appears or goes; partial moments after every shard."""
    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)
    options = dataclasses.replace(LITTLE_OPTIONS, dump=dump)
    run(tmp_path / "whole", options, **LITTLE)
    expected = contents(tmp_path / "whole")
    for step in range(1, 60, stride):
        out = tmp_path / f"{step}"
        if not killed_after(step, lambda out=out: run(out, options, **LITTLE)):
            break
        if not (out / "index.json").exists():
            with pytest.raises(UsageError, match=r"found (an unfinished run|no calibration)"):
                Calibration.open(out)
        if (out / "run.json").exists() or not (out / "index.json").exists():
            run(out, options, **LITTLE)
        assert contents(out) == expected, step
    assert step > 10


def test_resumed_run_reads_no_model_again_for_shards_it_has(run, loaded, tmp_path, monkeypatch):
    seen = []
    original = module.content_rows
    monkeypatch.setattr(module, "content_rows", lambda *args: seen.append(1) or original(*args))
    run(tmp_path / "whole")
    whole, stopped = len(seen), 0

    def stop(step, done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "c", progress=stop)
    stopped, seen[:] = len(seen) - whole, []
    run(tmp_path / "c")
    assert 0 < len(seen) < whole
    assert len(seen) + stopped == whole


@pytest.mark.parametrize(
    "change",
    [
        {"options": dataclasses.replace(OPTIONS, stride=2)},
        {"ids": token_ids(SEQUENCES, LENGTH, seed=5)},
        {"text": {"dataset": "another"}},
    ],
    ids=["options", "tokens", "text"],
)
def test_interrupted_run_is_not_resumed_with_anything_else(run, tmp_path, change):
    def stop(step, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "c", progress=stop)
    with pytest.raises(UsageError, match=r"interrupted run with other models, text or options"):
        run(tmp_path / "c", **change)


def test_finished_calibration_is_not_written_over(run, tmp_path):
    run(tmp_path / "c")
    before = contents(tmp_path / "c")
    with pytest.raises(UsageError, match=r"holds a finished calibration; pass --force"):
        run(tmp_path / "c")
    assert contents(tmp_path / "c") == before


def test_command_refuses_a_folder_that_is_taken_before_it_reads_text(run, kvmap_run, tmp_path):
    run(tmp_path / "c")
    (tmp_path / "file").write_text("")
    asked = ("collect", "tiny-s", "tiny-m", "--dataset", tmp_path / "absent.txt", "-o")
    for name, said in (("c", "holds a finished calibration"), ("file", "is no folder")):
        code, _, error = kvmap_run(*asked, tmp_path / name)
        assert (code, said in error) == (2, True), error
        assert kvmap_run(*asked, tmp_path / name, "-n")[:2] == (2, "")
    code, _, error = kvmap_run(*asked, tmp_path / "c", "--force")
    assert "absent.txt" in error
    assert (tmp_path / "c" / "index.json").exists()


def cut_short(shard):
    shard.write_bytes(shard.read_bytes()[:-3])


def rewritten(path, metadata=None, **changes):
    """Write an artifact again with other tensors (none without) and metadata, digests right."""
    opened = artifacts.open_artifact(path)
    tensors = {k: v for k, v in (opened.tensors() | changes).items() if v is not None}
    metadata = opened.metadata if metadata is None else opened.metadata | metadata
    artifacts.write(path, opened.kind, tensors, metadata, private=opened.kind != "moments")


@pytest.mark.parametrize(
    "damage",
    [
        cut_short,
        lambda shard: rewritten(shard, **{"key.0": None}),
        lambda shard: rewritten(shard, sequence=torch.zeros(32, dtype=torch.int64)),
    ],
    ids=["cut short", "no keys", "other sequences"],
)
def test_damaged_shard_of_an_interrupted_run_is_not_taken(run, tmp_path, damage):
    """It is made again, and the run ends as if it had never been interrupted."""

    def stop(step, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "c", progress=stop)
    damage(tmp_path / "c" / "source-00000.safetensors")
    run(tmp_path / "c")
    run(tmp_path / "whole")
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")


@pytest.mark.parametrize("products", ["float64", "float32"])
@pytest.mark.parametrize("shards", [1, None, "x", -1, 99])
def test_partial_moments_are_taken_up_where_they_are_sound(
    run, tmp_path, monkeypatch, shards, products
):
    monkeypatch.setattr(module, "SAVE_SECONDS", 0.0)
    options = dataclasses.replace(LITTLE_OPTIONS, dump=False, products=products)

    def stop(step, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "c", options, progress=stop, **LITTLE)
    rewritten(tmp_path / "c" / "moments.partial.safetensors", {"shards": shards})
    run(tmp_path / "c", options, **LITTLE)
    run(tmp_path / "whole", options, **LITTLE)
    assert contents(tmp_path / "c") == contents(tmp_path / "whole")


def test_clear_killed_anywhere_can_be_done_again(run, tmp_path, quick):
    """What is left in between passes for nothing."""
    whole = run(tmp_path / "whole", LITTLE_OPTIONS, **LITTLE).path
    for step in range(1, 30):
        out = tmp_path / f"{step}"
        shutil.copytree(whole, out)
        if not killed_after(step, lambda out=out: clear(out)):
            break
        with pytest.raises(UsageError, match=r"found (an unfinished run|no calibration)"):
            Calibration.open(out)
        clear(out)
        assert not out.exists()
    assert step > 4


# --- refusals


def test_models_with_other_tokenizers_are_refused(loaded, tmp_path):
    openers = tuple(lambda n=n: loaded(n) for n in ("llama_default", "other_tokenizer"))
    with pytest.raises(UsageError, match=r"cannot be paired: the tokenizers differ"):
        collect(openers, token_ids(4, 8), tmp_path / "c", OPTIONS, TEXT)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"held_out": 0.0}, r"--held-out is 0.0, expected a share between 0 and 1"),
        ({"held_out": 1.0}, r"--held-out is 1.0"),
        ({"dump": False, "moments": False}, r"--no-dump and --no-moments together"),
        ({"heads": "auto"}, r"found heads 'auto' and joint True, expected all or matched"),
        ({"joint": None}, r"found heads 'all' and joint None"),
        (
            {"stride": LENGTH},
            rf"of {LENGTH} tokens, one in {LENGTH} kept, none is left after the f",
        ),
        ({"stride": 0}, r"--stride must be at least 1"),
        ({"native_head": -1}, r"--native-head at least 0"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_any_work(run, tmp_path, changes, message):
    with pytest.raises(UsageError, match=message):
        run(tmp_path / "c", dataclasses.replace(OPTIONS, **changes))
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_sequences_shorter_than_what_is_kept_apart_are_refused(run, tmp_path, length):
    with pytest.raises(UsageError, match=rf"of {length} tokens, .* none is left after the first 4"):
        run(tmp_path / "c", dataclasses.replace(OPTIONS, stride=1), ids=token_ids(8, length))
    assert not (tmp_path / "c").exists()


def test_one_sequence_cannot_be_split(run, tmp_path):
    with pytest.raises(UsageError, match=r"found 1 sequences of 24 tokens, expected at least 2"):
        run(tmp_path / "c", ids=token_ids(1, LENGTH))


def test_folder_that_is_no_calibration_is_told(tmp_path):
    with pytest.raises(
        UsageError, match=r"found no calibration, expected a folder with index.json"
    ):
        Calibration.open(tmp_path)


def test_clear_removes_calibrations_only(run, tmp_path):
    run(tmp_path / "c")
    clear(tmp_path / "c")
    assert not (tmp_path / "c").exists()
    clear(tmp_path / "c")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one").write_text("dear")
    with pytest.raises(UsageError, match=r"letters: holds 'one' too, and is left alone"):
        clear(tmp_path / "letters")
    assert (tmp_path / "letters" / "one").exists()


# --- files whose digests are right and that are not of their calibration


def with_geometry(calibration, **changes):
    """Return the target's signature with another shape of cache."""
    data = calibration.target.to_json()
    return data | {"geometry": data["geometry"] | changes}


@pytest.fixture
def little(run, tmp_path):
    return run(tmp_path / "c", LITTLE_OPTIONS, **LITTLE)


@pytest.mark.parametrize(
    "changes", [{"layers": 2, "rope": [0, 0]}, {"head_size": 64}, {"kv_heads": 1}], ids=str
)
def test_moments_of_caches_of_another_shape_are_refused(little, changes):
    """Whichever of the two lies; and the index's lie does not pass for the same calibration."""
    index = artifacts.read_json(little.path / "index.json")
    artifacts.write_json(
        little.path / "index.json", index | {"target": with_geometry(little, **changes)}
    )
    lying = Calibration.open(little.path)
    assert lying.digest != little.digest
    with pytest.raises(
        UsageError,
        match=r"moments\.safetensors: its .* found it with another",
    ):
        lying.moments("train")
    rewritten(little.path / "moments.safetensors", {"target": with_geometry(little, **changes)})
    with pytest.raises(
        UsageError,
        match=r"moments\.safetensors: its .* found it with another",
    ):
        little.moments("train")


@pytest.mark.parametrize(
    "changes", [{"heads": "all"}, {"joint": True}, {"lookback_layers": [1]}, {"layers": [[0]]}]
)
def test_moments_of_another_scope_are_refused(little, changes):
    rewritten(little.path / "moments.safetensors", changes)
    with pytest.raises(UsageError, match=r"moments\.safetensors: keeps other heads or layers than"):
        little.moments("train")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_moments_of_another_type_are_refused(little, dtype):
    name, tensor = next(iter(little.moments("train").tensors.items()))
    path = little.path / "moments.safetensors"
    rewritten(path, **{f"train.{name}": tensor.to(dtype)})
    with pytest.raises(UsageError, match=rf"'train\.{name}' is of .*, expected float64; run"):
        indexed(little).moments("train")


@pytest.mark.parametrize("count", [0.0, -3.0])
def test_moments_of_no_rows_are_refused(little, count):
    names = [f"train.{n}" for n in little.moments("train").tensors if n.endswith(".count")]
    counts = dict.fromkeys(names, torch.tensor([count], dtype=torch.float64))
    rewritten(little.path / "moments.safetensors", **counts)
    changed = indexed(little)
    assert changed.moments("held_out").count > 0
    with pytest.raises(UsageError, match=r"keeps no train rows after the first tokens, found 9"):
        changed.moments("train")


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("token_ids", torch.zeros(4, 9), "is of float32, expected int32"),
        ("held_out", torch.tensor(True), r"has shape \(\), expected \(4,\)"),
        ("held_out", torch.arange(4), "is of int64, expected bool"),
    ],
    ids=str,
)
def test_tokens_of_another_type_are_refused(little, name, tensor, said):
    rewritten(little.path / "tokens.safetensors", **{name: tensor})
    with pytest.raises(UsageError, match=rf"tokens\.safetensors: '{name}' {said}; run"):
        indexed(little).token_ids("train")


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.tensor(True), r"has shape \(\), expected \(0,\)"),
        (torch.arange(4), "is of int64, expected bool"),
    ],
    ids=str,
)
def test_head_rows_of_another_type_are_refused(little, tensor, said):
    rewritten(little.path / "head-00000.safetensors", held_out=tensor)
    with pytest.raises(UsageError, match=rf"head-00000\.safetensors: 'held_out' {said}; run"):
        indexed(little).moments("train", with_head=True)


def indexed(calibration):
    """Return a calibration whose index is of the files as they are now."""
    write_index(calibration.path, calibration.index)
    return Calibration.open(calibration.path)


READS = {
    "moments": lambda made: made.moments("train"),
    "tokens": lambda made: made.token_ids("train"),
    "source-00001": lambda made: list(made.shards()),
    "target-00000": lambda made: list(made.shards()),
    "head-00000": lambda made: made.moments("train", with_head=True),
}


@pytest.mark.parametrize("name", READS)
def test_other_numbers_in_a_file_make_another_calibration(run, little, tmp_path, name):
    """So that no choice of layers and no map of the first is taken for it."""
    path = little.path / f"{name}.safetensors"
    first, tensor = sorted(artifacts.open_artifact(path).tensors().items())[-1]
    rewritten(path, **{first: tensor + 1})
    said = rf"{name}\.safetensors: is not the file that its calibration was written with; run"
    with pytest.raises(UsageError, match=said):
        READS[name](little)
    other = run(tmp_path / "o", LITTLE_OPTIONS, **LITTLE | {"ids": token_ids(4, 9, seed=8)})
    with pytest.raises(UsageError, match=said):
        merge([other, Calibration.open(little.path)], tmp_path / "merged")
    assert indexed(little).digest != little.digest


def test_a_calibration_without_digests_is_refused_and_can_be_replaced(run, tmp_path):
    made = run(tmp_path / "c", LITTLE_OPTIONS, **LITTLE)
    before = contents(made.path)
    old = {key: value for key, value in made.index.items() if key != "digests"}
    artifacts.write_json(made.path / "index.json", old)
    with pytest.raises(UsageError, match=r"c: was collected by an earlier kvmap.*, with --force"):
        Calibration.open(made.path)
    run(made.path, LITTLE_OPTIONS, force=True, **LITTLE)
    assert contents(made.path) == before


@pytest.mark.parametrize("force", [True, None])
def test_a_damaged_record_of_a_run_names_the_way_out(run, tmp_path, force):
    """Which works, and which the cache folder (None), where nobody says so, takes by itself."""
    parts = [run(tmp_path / "whole", LITTLE_OPTIONS, **LITTLE)]
    parts += [run(tmp_path / "o", LITTLE_OPTIONS, **LITTLE | {"ids": token_ids(4, 9, seed=8)})]
    whole = contents(parts[0].path)
    shutil.copytree(tmp_path / "whole", tmp_path / "c")
    (tmp_path / "c" / "index.json").unlink()
    (tmp_path / "c" / "run.json").write_text('{"kind": "ru')
    said = r"run\.json: is damaged or not a kvmap file; pass --force to start anew"
    with pytest.raises(UsageError, match=said):
        run(tmp_path / "c", LITTLE_OPTIONS, **LITTLE)
    with pytest.raises(UsageError, match=said):
        merge(parts, tmp_path / "c")
    run(tmp_path / "c", LITTLE_OPTIONS, force=force, **LITTLE)
    assert contents(tmp_path / "c") == whole


# --- merge


@pytest.fixture
def halves(run, tmp_path):
    """Return calibrations of sequences 0..5 and 6..10."""
    ids = token_ids(SEQUENCES, LENGTH)

    def make(options=OPTIONS):
        parts = (("a", ids[:6]), ("b", ids[6:]))
        return [run(tmp_path / name, options, ids=part, text={"t": name}) for name, part in parts]

    return make


@pytest.mark.parametrize("dump", [True, False])
def test_merged_calibration_is_that_of_all_sequences(halves, tmp_path, dump):
    parts = halves(dataclasses.replace(OPTIONS, dump=dump))
    made = merge(parts, tmp_path / "ab")
    assert made.tokens == SEQUENCES * LENGTH
    assert made.index["text"] == {"merged": [{"t": "a"}, {"t": "b"}]}
    for split in ("train", "held_out"):
        expected = torch.cat([part.token_ids(split) for part in parts])
        assert torch.equal(made.token_ids(split), expected)
        for with_head in (False, True):
            found = made.moments(split, with_head)
            assert found.count == sum(part.moments(split, with_head).count for part in parts)
            one = copy.deepcopy(parts[0].moments(split, with_head))
            one.merge(parts[1].moments(split, with_head))
            for name, tensor in one.tensors.items():
                scale = tensor.abs().max().clamp_min(1e-30)
                assert (found.tensors[name] - tensor).abs().max() <= 1e-10 * scale, name
    if dump:
        sequence = torch.cat([shard[2] for shard in made.shards()])
        assert sequence.tolist() == [s for s in range(SEQUENCES) for _ in KEPT]


def test_merged_dump_and_merged_moments_agree(halves, tmp_path):
    made = merge(halves(), tmp_path / "ab")
    (tmp_path / "ab" / "moments.safetensors").unlink()
    again = Calibration.open(tmp_path / "ab")
    for split in ("train", "held_out"):
        one, other = (found.moments(split).tensors for found in (made, again))
        for name in one:
            assert (one[name] - other[name]).abs().max() <= 1e-10 * one[name].abs().max(), name


def test_merging_leaves_the_parts_alone(halves, tmp_path):
    parts = halves()
    before = [contents(part.path) for part in parts]
    merge(parts, tmp_path / "ab")
    assert [contents(part.path) for part in parts] == before


def test_merge_killed_anywhere_can_be_done_again(run, tmp_path, quick):
    one, other = LITTLE | {"ids": token_ids(4, 9)[:2]}, LITTLE | {"ids": token_ids(4, 9)[2:]}
    parts = [run(tmp_path / n, LITTLE_OPTIONS, **half) for n, half in (("a", one), ("b", other))]
    merge(parts, tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    for step in range(1, 30):
        out = tmp_path / f"{step}"
        if not killed_after(step, lambda out=out: merge(parts, out)):
            break
        if (out / "run.json").exists() or not (out / "index.json").exists():
            merge(parts, out)
        assert contents(out) == expected, step
    assert step > 5


@pytest.mark.parametrize("name", ["moments", "source-00001", "head-00000", "tokens"])
def test_merge_of_a_damaged_part_leaves_nothing(halves, tmp_path, name):
    parts = halves()
    cut_short(parts[1].path / f"{name}.safetensors")
    parts = [Calibration.open(part.path) for part in parts]
    with pytest.raises(UsageError, match=rf"b/{name}\.safetensors: is cut short"):
        merge(parts, tmp_path / "ab")
    assert not (tmp_path / "ab").exists()


def test_one_part_is_not_merged(halves, tmp_path):
    with pytest.raises(UsageError, match=r"found 1 calibration to merge, expected at least 2"):
        merge(halves()[:1], tmp_path / "ab")


def test_shared_sequences_are_refused(halves, tmp_path):
    """A sequence trained on in one part could be held out in the other."""
    parts = halves()
    with pytest.raises(UsageError, match=r"share sequences"):
        merge([*parts, parts[0]], tmp_path / "ab")


@pytest.mark.parametrize(
    "changed", [{"stride": 2}, {"lookback_layers": (2,)}, {"moments": False}], ids=str
)
def test_parts_collected_otherwise_are_refused(halves, run, tmp_path, changed):
    options = dataclasses.replace(OPTIONS, **changed)
    other = run(tmp_path / "o", options, ids=token_ids(4, LENGTH, seed=8))
    with pytest.raises(UsageError, match=rf"differ in {next(iter(changed))}; collect both alike"):
        merge([halves()[0], other], tmp_path / "ab")
    assert not (tmp_path / "ab").exists()


def test_parts_of_other_models_are_refused(halves, loaded, tmp_path):
    openers = tuple(lambda n=n: loaded(n) for n in ("llama_default", "llama_llama3"))
    other = collect(openers, token_ids(4, LENGTH, seed=8), tmp_path / "o", OPTIONS, TEXT)
    with pytest.raises(UsageError, match=r"its source is .*with calibrations of its own pair"):
        merge([halves()[0], other], tmp_path / "ab")


def test_merge_does_not_write_among_other_files(halves, tmp_path):
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "letter").write_text("dear")
    with pytest.raises(UsageError, match=r"is not empty"):
        merge(halves(), tmp_path / "ab")


@pytest.mark.parametrize(("asked", "kept"), [((), (0, 1)), ((2,), (2,)), ((0, 1, 2), (0, 1, 2))])
def test_the_source_keeps_some_layers_of_the_tokens_before(run, native_rows, tmp_path, asked, kept):
    """Some tokens late, zeros ahead of the first; the first and the middle layer if not asked."""
    made = run(tmp_path / "c", dataclasses.replace(OPTIONS, lookback_layers=asked))
    assert made.scope.lookback_layers == made.moments("train").lookback_layers == kept
    shards = list(made.shards())
    for (back, side), kind, layer in product(enumerate(BACK, 1), ("key", "value"), kept):
        found = torch.cat([rows.entries[side, kind][layer] for rows, *_ in shards]).flatten(1)
        expected = native_rows["source", kind][layer]
        late = np.pad(expected, ((0, 0), (back, 0), (0, 0)))[:, :-back][:, ::STRIDE]
        np.testing.assert_allclose(found.numpy(), late.reshape(len(found), -1), atol=2e-5)


CHOSEN = ((0,), (1, 2), (0, 2), (1,))


@pytest.mark.parametrize("heads", ["all", "matched"])
@pytest.mark.parametrize("dump", [True, False])
def test_moments_of_chosen_layers_make_the_same_map(run, tmp_path, heads, dump):
    """Two passes, the second with what the first chose, against one with all blocks: to 1e-10
    as solved, and to the last digits of float32 as kept.
    """
    full = run(tmp_path / "full", dataclasses.replace(OPTIONS, heads=heads))
    shapes = (full.source.geometry, full.target.geometry)
    layers = tuple(
        tuple(s for s in CHOSEN[t % 4] if s < shapes[0].layers) for t in range(shapes[1].layers)
    )
    some = dataclasses.replace(OPTIONS, heads=heads, layers=layers, dump=dump, moments=not dump)
    part = run(tmp_path / "part", some)
    chosen = with_lookback(recipe("kvmap-matched"), full.scope.lookback_layers)
    chosen = replace(chosen, ridge=1e-3)
    options = with_assignment(replace(chosen.options, heads=heads), *shapes)
    chosen = replace(chosen, options=options)
    data = [splits(found, 4) for found in (full, part)]
    for index, row in enumerate(layers):
        for read, made in regressions(data[0], index, row, options):
            exact, mine = (solve(one.train.covariance(read, made), 1e-3)[0] for one in data)
            torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-10)
    maps = [fit_map(found, layers, chosen, lambda *_: None).cmap for found in (full, part)]
    for mine, theirs in zip(*(cmap.layers for cmap in maps), strict=True):
        for kind in ("key", "value") if mine else ():
            torch.testing.assert_close(mine.of(kind).weight, theirs.of(kind).weight)
    request = FitRequest(chosen, out=tmp_path / "chosen.map")
    assert fit_calibration(part, request, lambda *_: None).cmap.layers[1].source_layers == layers[1]


def test_moments_of_chosen_layers_know_nothing_of_others(run, loaded, tmp_path):
    depth = loaded(PAIR[1]).signature.geometry.layers
    part = run(tmp_path / "part", dataclasses.replace(OPTIONS, layers=((0,),) * depth))
    rows = ((1,),) * depth
    with pytest.raises(UsageError, match="without --layers or with those that the map reads"):
        fit_map(part, rows, replace(recipe("paper"), k=1), lambda *_: None)
