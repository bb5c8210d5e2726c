"""Artifacts are whole or refused, in one sentence, whatever the bytes are."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvmap import artifacts, atomic, header
from kvmap.errors import KvmapError, UsageError


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "b.weight": torch.randn(3, 5, generator=generator),
        "a.bias": torch.randn(7, generator=generator).to(torch.bfloat16),
        "count": torch.arange(4),
        "mask": torch.tensor([True, False, True]),
        "sum": torch.randn(2, generator=generator, dtype=torch.float64),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }


@pytest.fixture
def saved(tmp_path):
    return artifacts.write(tmp_path / "x.map", "map", tensors(), {"ridge": 1e-3, "name": "λ"})


def refuse(path, problem, kind="map"):
    """Every refusal is one line of exit code 2 that names the file and a command to run."""
    with pytest.raises(UsageError, match=problem) as caught:
        artifacts.open_artifact(path, kind)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    assert "run `" in message
    assert caught.value.exit_code == 2
    return message


def test_what_is_written_is_read_back(saved):
    opened = artifacts.open_artifact(saved, "map")
    assert opened.kind == "map"
    assert opened.metadata == {"ridge": 1e-3, "name": "λ"}
    assert opened.names() == sorted(tensors())
    assert opened.shape("b.weight") == (3, 5)
    for name, tensor in tensors().items():
        assert opened.tensor(name).dtype == tensor.dtype
        assert torch.equal(opened.tensors()[name], tensor)


def test_the_file_is_plain_safetensors(saved):
    with safe_open(str(saved), framework="pt") as file:
        assert torch.equal(file.get_tensor("b.weight"), tensors()["b.weight"])
        assert list(file.metadata()) == ["kvmap"]
        fields = json.loads(file.metadata()["kvmap"])
    assert fields["kind"] == "map"
    assert fields["version"] == 1
    assert len(fields["sha256"]) == 64


def test_equal_input_gives_equal_bytes(saved, tmp_path):
    reversed_order = dict(reversed(tensors().items()))
    other = artifacts.write(tmp_path / "y.map", "map", reversed_order, {"ridge": 1e-3, "name": "λ"})
    assert other.read_bytes() == saved.read_bytes()


def test_the_digest_covers_names_shapes_and_dtypes(tmp_path):
    zeros = torch.zeros(2, 3)
    variants = [{"a": zeros}, {"b": zeros}, {"a": zeros.T}, {"a": zeros.to(torch.int32)}]
    digests = {
        artifacts.open_artifact(artifacts.write(tmp_path / "x", "map", v, {})).sha256
        for v in variants
    }
    assert len(digests) == len(variants)


def test_a_view_is_written_as_what_it_shows(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    path = artifacts.write(tmp_path / "x", "dump", {"t": base.T, "s": base[1:, ::2]}, {})
    opened = artifacts.open_artifact(path)
    assert torch.equal(opened.tensor("t"), base.T)
    assert torch.equal(opened.tensor("s"), base[1:, ::2])


def test_metadata_cannot_replace_what_the_file_says_of_itself(tmp_path):
    lies = {"kind": "cache", "version": 9, "sha256": "0", "header_sha256": "0", "true": 1}
    opened = artifacts.open_artifact(artifacts.write(tmp_path / "x", "map", {}, lies))
    assert opened.kind == "map"
    assert opened.metadata == {"true": 1}


def test_every_flipped_byte_is_refused(tmp_path):
    """The digests leave no byte of a file out: not the header, its padding nor the tensors."""
    path = artifacts.write(tmp_path / "x.map", "map", {"w": torch.ones(3)}, {"ridge": 0.5})
    good = path.read_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 7
        path.write_bytes(bad)
        with pytest.raises(UsageError, match=r"^.*x\.map: [^\n]*run `[^\n]*$"):
            artifacts.open_artifact(path, "map")


def test_every_truncation_is_refused(saved):
    good = saved.read_bytes()
    for length in [0, 1, 7, 8, 9, 100, len(good) // 2, len(good) - 1]:
        saved.write_bytes(good[:length])
        refuse(saved, "safetensors|cut short|damaged")


def test_trailing_bytes_are_refused(saved):
    saved.write_bytes(saved.read_bytes() + b"more")
    refuse(saved, "cut short or damaged")


def test_another_kind_is_refused(saved):
    message = refuse(saved, "is a map file, where a layers was expected", kind="layers")
    assert message.endswith("run `kvmap select-layers CALIB -o LAYERS` to make one")


def test_a_newer_version_is_refused(saved, monkeypatch, tmp_path):
    monkeypatch.setattr(header, "VERSION", 2)
    newer = artifacts.write(tmp_path / "new.map", "map", tensors(), {})
    monkeypatch.undo()
    refuse(newer, "version 2, newer than this kvmap's 1; run `pip install")


def test_nan_is_refused_when_written_and_when_read(tmp_path, monkeypatch):
    bad = {"w": torch.tensor([1.0, float("nan")])}
    with pytest.raises(KvmapError, match="'w' would hold NaN or infinity"):
        artifacts.write(tmp_path / "x.map", "map", bad, {})
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(artifacts, "_finite", lambda tensor: True)
    path = artifacts.write(tmp_path / "x.map", "map", bad, {})
    monkeypatch.undo()
    refuse(path, "holds NaN or infinity in 'w'")
    assert artifacts.open_artifact(path, "map", verify=False).names() == ["w"]


def test_a_missing_tensor_is_named(saved):
    with pytest.raises(UsageError, match=r"lacks the tensor 'c'; run `kvmap fit"):
        artifacts.open_artifact(saved).tensor("c")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "no safetensors file"),
        (b"\xff" * 64, "no safetensors file"),
        (b"# Notes\n\nsome text that is long enough", "no safetensors file"),
        ((99_999_999).to_bytes(8, "little") + b"{}", "cut short"),
        ((4).to_bytes(8, "little") + b"\xff\xfe{}", "damaged or not a kvmap file"),
        ((2).to_bytes(8, "little") + b"{}", "was not written by kvmap"),
        ((2).to_bytes(8, "little") + b"[]", "was not written by kvmap"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "damaged or not a kvmap file"),
    ],
    ids=["empty", "ones", "text", "huge", "not-utf8", "bare", "list", "deep"],
)
def test_foreign_bytes_are_refused(tmp_path, content, problem):
    path = tmp_path / "x.map"
    path.write_bytes(content)
    refuse(path, problem)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '"map"',
        '{"kind": 3}',
        '{"kind": "map"}',
        '{"kind": "weights", "version": 1}',
        '{"kind": "map", "version": "1"}',
        '{"kind": "map", "version": true}',
        '{"kind": "map", "version": -1}',
        '{"kind": "map", "version": 1, "sha256": NaN}',
        '{"kind": "map", "version": 1, "x": "\\ud800"}',
        "{" + '"a":{' * 5000 + "}" * 5000 + "}",
    ],
)
def test_a_header_of_wrong_types_is_refused(tmp_path, text):
    path = tmp_path / "x.map"
    save_file({"w": torch.ones(2)}, path, {"kvmap": text})
    refuse(path, "x.map")


def test_an_ordinary_checkpoint_is_refused(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    refuse(tmp_path / "model.safetensors", "was not written by kvmap")


def test_what_is_no_file_is_refused_without_opening_it(tmp_path):
    refuse(tmp_path / "absent.map", "no such file")
    refuse(tmp_path, "is a folder, where a map file was expected")
    os.mkfifo(tmp_path / "pipe.map")
    refuse(tmp_path / "pipe.map", "a device or a pipe")
    (tmp_path / "zero.map").symlink_to("/dev/zero")
    refuse(tmp_path / "zero.map", "a device or a pipe")
    refuse("nul\0.map", "no such file")
    refuse("n" * 5000, "no such file")


def test_private_files_are_for_their_owner_alone(tmp_path, saved):
    secret = artifacts.write(tmp_path / "x.cache", "cache", {}, {}, private=True)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(saved.stat().st_mode) & 0o444
    saved.chmod(0o644)
    artifacts.write(saved, "cache", {}, {}, private=True)
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600


@pytest.mark.parametrize("stop_after", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "cause",
    [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), MemoryError()],
    ids=["full", "ctrl-c", "memory"],
)
def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    saved, monkeypatch, stop_after, cause
):
    before = saved.read_bytes()

    class Failing:
        def __init__(self, file):
            self.file, self.left = file, stop_after

        def write(self, chunk):
            if not self.left:
                raise cause
            self.left -= 1
            self.file.write(chunk)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    monkeypatch.setattr(atomic, "open", lambda *a: Failing(open(*a)), raising=False)  # noqa: SIM115
    expected = KvmapError if isinstance(cause, OSError) else type(cause)
    with pytest.raises(expected) as caught:
        artifacts.write(saved, "map", tensors(), {})
    if expected is KvmapError:
        assert "could not be written (No space left on device)" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_at_the_last_step_leaves_nothing(saved, monkeypatch, call):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    before = saved.read_bytes()
    monkeypatch.setattr(atomic.os, call, fail)
    with pytest.raises(KvmapError, match="Input/output error"):
        artifacts.write(saved, "map", {}, {})
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]


def test_a_killed_write_is_swept_by_the_next(tmp_path):
    path = tmp_path / "x.map"
    script = f"""
import os, signal
from kvmap import atomic
def chunks():
    yield b"half"
    os.kill(os.getpid(), signal.SIGKILL)
atomic.write({str(path)!r}, chunks())
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not path.exists()
    assert len(list(tmp_path.iterdir())) == 1
    artifacts.write(path, "map", {}, {})
    assert list(tmp_path.iterdir()) == [path]


def test_a_running_process_keeps_its_temporary_file(tmp_path):
    other = tmp_path / f".x.map.{os.getppid()}.tmp"
    other.write_bytes(b"half")
    artifacts.write(tmp_path / "x.map", "map", {}, {})
    assert other.exists()


def test_a_device_is_never_replaced(tmp_path):
    """As root, renaming onto /dev/null would break the machine."""
    (tmp_path / "out").symlink_to("/dev/null")
    for path in ["/dev/null", tmp_path / "out", tmp_path]:
        with pytest.raises(UsageError, match="is no ordinary file"):
            artifacts.write(path, "map", {}, {})


def test_a_link_keeps_pointing_at_the_new_file(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    artifacts.write(tmp_path / "link", "map", {}, {})
    assert (tmp_path / "link").is_symlink()
    assert header.peek(tmp_path / "real") == "map"


def test_writing_stops_before_work_on_what_is_there(saved, tmp_path):
    with pytest.raises(UsageError, match=r"x\.map: exists already; pass --force to replace it"):
        artifacts.refuse_overwrite(saved, force=False)
    artifacts.refuse_overwrite(saved, force=True)
    artifacts.refuse_overwrite(tmp_path / "new.map", force=False)
    with pytest.raises(UsageError, match="no such folder; run `mkdir -p "):
        artifacts.refuse_overwrite(tmp_path / "absent" / "new.map", force=True)
    with pytest.raises(UsageError, match="no such folder; run `mkdir -p "):
        artifacts.write(tmp_path / "absent" / "new.map", "map", {}, {})


def test_json_artifacts_are_checked_alike(tmp_path):
    path = artifacts.write_json(
        tmp_path / "index.json", {"kind": "calibration", "nll": float("nan"), "shards": ["a"]}
    )
    expected = {"kind": "calibration", "nll": None, "shards": ["a"]}
    assert artifacts.read_json(path, "calibration") == expected
    assert header.peek(tmp_path) == "calibration"
    with pytest.raises(UsageError, match="is a calibration file, where a report was expected"):
        artifacts.read_json(path, "report")
    good = path.read_text()
    for bad in [good.replace('"a"', '"b"'), good[:-10], "", "[]", good.replace("null", "NaN")]:
        path.write_text(bad)
        with pytest.raises(UsageError, match=r"index\.json: [^\n]*run `kvmap collect"):
            artifacts.read_json(path, "calibration")


def test_peek_tells_the_kind_and_refuses_the_rest(saved, tmp_path):
    assert header.peek(saved) == "map"
    report = artifacts.write_json(tmp_path / "report.json", {"kind": "report"})
    assert header.peek(report) == "report"
    with pytest.raises(UsageError, match=r"index\.json: no such file; run `kvmap collect"):
        header.peek(tmp_path)
    with pytest.raises(UsageError, match="no such file"):
        header.peek(Path("absent"))
