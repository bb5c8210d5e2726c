"""Input that nobody would give on purpose: it ends in one sentence and leaves other files alone."""

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import measured
import pytest
import torch

from kvmap import artifacts, atomic, header
from kvmap.calibration import Calibration
from kvmap.calibration_files import load_rows
from kvmap.clearing import clear
from kvmap.cli import app as command
from kvmap.cli.output import Output
from kvmap.collect_options import CollectOptions
from kvmap.columns import BACK, KINDS
from kvmap.errors import KvmapError, UsageError
from kvmap.evaluate import evidence
from kvmap.evaluate.journal import Journal
from kvmap.evaluate.report import Report
from kvmap.geometry import Geometry, RopeTable, Signature
from kvmap.layers import load_layers
from kvmap.mapping import CacheMap, MapOptions
from kvmap.models.devices import pick_device
from kvmap.pipeline import cache_folder, sound_or_none
from kvmap.text import read_file
from kvmap.transfer import message_ids, prompt_ids

TABLE = RopeTable((1.0, 0.1))
GEOMETRY = Geometry(2, 2, 4, 4, 16, 32, 64, "qwen3", (TABLE, TABLE))
SIGNATURE = Signature("a", None, "c", "w", "t", "p", "float32", GEOMETRY)
# Layers of the tokens before that are none; the last is one that the source has not.
LATE = ([], None, 0, ["0"], [1, 0], [-1, 0], [2])


# --- headers whose digest is right and whose fields are not


@pytest.mark.parametrize(
    "change",
    [
        {"layers": "2"},
        {"layers": 10**12},
        {"layers": 3},
        {"kv_heads": 0},
        {"head_size": -1},
        {"head_size": 4.0},
        {"vocabulary": None},
        {"rope": [7, 7]},
        {"rope_tables": [5]},
        {"rope_tables": [asdict(replace(TABLE, layout="other"))]},
        {"rope_tables": [asdict(replace(TABLE, scaling=0.0))]},
        {"rope_tables": [asdict(replace(TABLE, scaling=float("nan")))]},
        {"rope_tables": [asdict(replace(TABLE, inverse_frequencies=()))]},
        {"rope_tables": [asdict(replace(TABLE, inverse_frequencies=(1.0,) * 3))]},
        {"rope_tables": [asdict(replace(TABLE, inverse_frequencies=(1.0, 1e308)))]},
    ],
    ids=str,
)
def test_a_geometry_that_no_cache_has_is_not_rebuilt(change, tmp_path):
    data = SIGNATURE.to_json()
    data["geometry"] |= change
    with (
        pytest.raises(UsageError, match=r"x: the cache's header is not sound \("),
        header.sound(tmp_path / "x", "cache"),
    ):
        Signature.from_json(data)


def test_names_that_move_the_cursor_are_spelt_out(kvmap_run, tmp_path):
    """A sentence stays one line, and a header says nothing to the terminal."""
    odd = "\x1b[2Jeé\nx"
    name = tmp_path / f"{odd}.map"
    code, _, error = kvmap_run("show", name)
    assert (code, error.count("\n")) == (2, 1)
    assert "\\x1b[2Jeé\\nx.map: no such file" in error
    path = tmp_path / "r.json"
    artifacts.write_json(path, {"kind": "report", "model": {odd: odd}})
    code, text, _ = kvmap_run("show", path)
    assert (code, text.splitlines()[-1]) == (0, "model  \\x1b[2Jeé\\nx \\x1b[2Jeé\\nx")


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_header_nested_too_deep_is_not_sound(kvmap_run, tmp_path, form):
    deep = []
    for _ in range(800):
        deep = [deep]
    path = artifacts.write(tmp_path / "a", "dump", {}, {"deep": deep})
    code, text, error = kvmap_run("show", path, *form)
    assert (code, text) == (2, "")
    assert "header is not sound" in error


ODD = "x\x1b[2J\nfa\x9bke"
SPELT = "x\\x1b[2J\\nfa\\x9bke"


def test_names_in_a_file_say_nothing_to_the_terminal(kvmap_run, tmp_path):
    """Neither those of tensors, as text and as JSON, nor those of models in a report."""
    path = artifacts.write(tmp_path / "a", "dump", {ODD: torch.zeros(2)}, {})
    code, text, _ = kvmap_run("show", path)
    assert (code, text.splitlines()[-1]) == (0, f"{SPELT}  2")
    code, text, _ = kvmap_run("show", path, "--json")
    assert (code, json.loads(text)["tensors"]) == (0, {ODD: [2]})
    assert not re.search(r"[\x1b\x9b]", text)
    figures = {"about": {"source": ODD, "target": "b"}, "arms": {}, "tasks": {}, "intervals": {}}
    figures |= (
        {"documents": 3} | dict.fromkeys(("n", "verdict")) | {"cosine": {"mean": 0.5, "worst": 0}}
    )
    ratios = ("retention", "floor_normalised_retention", "gap_recovered", "gap_recovered_nll")
    figures |= dict.fromkeys((*ratios, "margin"))
    figures["intervals"] = dict.fromkeys((*ratios, "margin"))
    path = Report(figures).save(tmp_path / "b")
    code, text, _ = kvmap_run("report", path)
    assert (code, f"{SPELT} → b" in text) == (0, True)


def test_notes_and_texts_of_several_lines_stay_so(capsys, monkeypatch):
    """With their tabs, and colours of our own where the terminal has some; no other escape."""
    text = "a\tb\n\x1b[48;5;232mc\x1b[0m\x1b[31m\r"
    plain = "a\tb\n\\x1b[48;5;232mc\\x1b[0m\\x1b[31m\\r\n"
    Output().note(text)
    Output().document({}, lambda: text)
    assert capsys.readouterr() == (plain, plain)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    Output().note(text)
    assert capsys.readouterr().err == "a\tb\n\x1b[48;5;232mc\x1b[0m\\x1b[31m\\r\n"


def test_a_signature_is_made_of_text():
    assert Signature.from_json(SIGNATURE.to_json()) == SIGNATURE
    with pytest.raises(ValueError, match="must be text"):
        Signature.from_json(SIGNATURE.to_json() | {"name": 5})


LAYERS = {"k": 1, "layers": [[0], [1]]}


@pytest.mark.parametrize(
    "change",
    [
        {"k": "1"},
        {"k": 2},
        {"k": 10**30},
        {"layers": 5},
        {"layers": [[0]]},
        {"layers": [[0], []]},
        {"layers": [[0], [-1]]},
        {"layers": [[0], [2]]},
        {"layers": [[0], [10**30]]},
        {"layers": [[0], [1, 1]]},
        {"layers": [[0], [0.5]]},
        {"layers": [[0], ["1"]]},
        {"tried": {"x": 1}},
        {"tried": {"1": "y"}},
        {"tried": [1]},
    ],
    ids=str,
)
def test_a_choice_of_layers_that_is_none_is_refused(change, tmp_path):
    tables = {f"{split}.{k}": torch.eye(2) for split in ("train", "held_out") for k in KINDS}
    artifacts.write(tmp_path / "good", "layers", tables, LAYERS)
    assert load_layers(tmp_path / "good")[1] == ((0,), (1,))
    artifacts.write(tmp_path / "bad", "layers", tables, LAYERS | change)
    with pytest.raises(UsageError, match=r"bad: the layers's header is not sound \("):
        load_layers(tmp_path / "bad")


@pytest.mark.parametrize(
    "change",
    [
        {"heads": "some"},
        {"joint": 1},
        {"native_tail": 0},
        {"native_tail": "64"},
        {"native_head": -1},
        {"native_head": True},
        {"native_layers": -1},
        {"assignment": ["0"]},
        {"assignment": None},
        *({"lookback_layers": bad} for bad in LATE[:-1]),
        {"unheard": 1},
    ],
    ids=str,
)
def test_options_of_no_map_are_not_rebuilt(change, tmp_path):
    data = json.loads(json.dumps(asdict(MapOptions())))
    assert MapOptions.from_json(data) == MapOptions()
    with (
        pytest.raises(UsageError, match=r"x: the map's header is not sound \("),
        header.sound(tmp_path / "x", "map"),
    ):
        MapOptions.from_json(data | change)


INDEX = {
    "kind": "calibration",
    "source": SIGNATURE.to_json(),
    "target": SIGNATURE.to_json(),
    "options": asdict(CollectOptions(heads="all", joint=True, lookback_layers=(0,))),
    "text": {},
    "tokens_digest": "d",
    "sequences": 8,
    "length": 4,
    "shards": [
        {
            "source": "source-00000.safetensors",
            "target": "target-00000.safetensors",
            "sequences": 8,
        }
    ],
    "heads": ["head-00000.safetensors"],
    "digests": ["d"] * 5,
}
BAD_OPTIONS = (
    {"native_head": "4"},
    {"native_head": -5},
    {"stride": 0},
    {"stride": True},
    {"held_out": "x"},
    {"held_out": 1.0},
    {"shard": 0},
    {"heads": "some"},
    {"heads": []},
    {"moments": False},
    {"dump": False},
    {"layers": [[]] * 2},
    {"layers": [[0]]},
    {"layers": [[0], [2]]},
    *({"lookback_layers": bad} for bad in LATE),
)


@pytest.mark.parametrize(
    "change",
    [
        {"heads": ["../../etc/passwd"]},
        {"heads": ["/etc/passwd"]},
        {"heads": ["head-00000.safetensors/../x"]},
        {"heads": [5]},
        {"shards": [{"source": "../source-00000.safetensors", "target": "x"}]},
        {"shards": 5},
        {"sequences": "8"},
        {"sequences": 10**15},
        {"length": 0},
        {"options": {}},
        {"heads": "some"},
        {"heads": []},
        {"heads": INDEX["heads"] * 2},
        {"shards": [{k: v for k, v in INDEX["shards"][0].items() if k != "sequences"}]},
        {"shards": [INDEX["shards"][0] | {"sequences": 0}]},
        {"source": SIGNATURE.to_json() | {"dtype": "bogus"}},
        *({"options": INDEX["options"] | bad} for bad in BAD_OPTIONS),
        {"text": None, "tokens_digest": 5},
        {"digests": ["d"] * 4},
        {"digests": [5] * 5},
        {"digests": {}},
        {"source": {}},
    ],
    ids=str,
)
def test_an_index_that_is_none_or_names_files_elsewhere_is_refused(change, tmp_path):
    artifacts.write_json(tmp_path / "index.json", INDEX)
    assert Calibration.open(tmp_path).tokens == 32
    artifacts.write_json(tmp_path / "index.json", INDEX | change)
    with pytest.raises(
        UsageError, match=r"index\.json: the calibration's header is not sound"
    ) as no:
        Calibration.open(tmp_path)
    assert "\n" not in str(no.value)


def dump(path, model, rows=3, heads=2):
    entries = [f"{kind}.{layer}" for layer in range(2) for kind in KINDS]
    entries += [f"{side}.{kind}.0" for side in BACK for kind in KINDS]
    tensors = {name: torch.zeros(rows, heads, 4) for name in entries}
    tensors |= {name: torch.arange(rows) for name in ("position", "sequence")}
    return artifacts.write(path, "dump", tensors, {"model": model.to_json()})


def test_rows_of_another_model_or_shape_are_refused(tmp_path):
    pair = (SIGNATURE, replace(SIGNATURE, weights_digest="other"))
    paths = [dump(tmp_path / f"{at}", model) for at, model in enumerate(pair)]
    assert load_rows(*paths, pair, (0,))[0].count == 3
    with pytest.raises(
        UsageError, match=r"0: its .* is a \(digest .*\), found a \(digest .*\); run"
    ):
        load_rows(paths[0], paths[1], pair[::-1], (0,))
    dump(paths[1], pair[1], heads=1)
    with pytest.raises(UsageError, match=r"'key\.0' has shape \(3, 1, 4\), expected \(3, 2, 4\)"):
        load_rows(*paths, pair, (0,))
    turned = replace(GEOMETRY, rope=(None, None))
    dump(paths[1], replace(pair[1], geometry=turned))
    with pytest.raises(UsageError, match=r"1: its calibration's model is a .*another cache shape"):
        load_rows(*paths, pair, (0,))


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("position", torch.tensor(1), r"has shape \(\), expected \(0,\)"),
        ("position", torch.arange(3.0), "is of float32, expected int64"),
        ("sequence", torch.arange(3.0), "is of float32, expected int64"),
        ("sequence", torch.arange(2), r"has shape \(2,\), expected \(3,\)"),
        ("key.0", torch.zeros(3, 2, 4, dtype=torch.int32), "is of int32, expected float64 or "),
        ("value.1", torch.zeros(3, 2, 4, dtype=torch.bool), "is of bool, expected float64 or "),
        ("back1.key.0", torch.zeros(3, 8), r"has shape \(3, 8\), expected \(3, 2, 4\)"),
    ],
    ids=str,
)
def test_rows_of_another_type_or_rank_are_refused(name, tensor, said, tmp_path):
    path = dump(tmp_path / "a", SIGNATURE)
    tensors = artifacts.open_artifact(path).tensors() | {name: tensor}
    artifacts.write(path, "dump", tensors, {"model": SIGNATURE.to_json()})
    with pytest.raises(UsageError, match=f"a: '{name}' {said}"):
        load_rows(path, path, (SIGNATURE,) * 2, (0,))


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": None},
        {"n": "5"},
        {"tasks": {}},
        {"intervals": []},
        {"undefined": 5},
        {"cosine": None},
        {"report_file_sha256": ...},
        {"unsure": ...},
        dict.fromkeys(evidence.FIGURES, ...) | {"state": "none"},
    ],
    ids=str,
)
def test_evidence_that_says_less_than_it_should_is_damaged(change, tmp_path):
    path = tmp_path / "a.map"
    path.write_text("a map")
    good = dict.fromkeys((*evidence.FIGURES, "report_file_sha256", "figures_sha256"))
    good |= {"kind": "report", "map_file_sha256": evidence.digest(path), "verdict": "recovers"}
    good |= {"n": 5, "documents": 5, "tasks": ["text"], "cosine": {}}
    good |= {"intervals": {}, "undefined": {}, "state": "none"}
    artifacts.write_json(evidence.evidence_path(path), good)
    assert evidence.require(path)["state"] == "valid"
    bad = {k: v for k, v in (good | change).items() if v is not ...}
    artifacts.write_json(evidence.evidence_path(path), bad)
    with pytest.raises(UsageError, match=r"a\.map\.evidence\.json: the report's header is not so"):
        evidence.require(path)


@pytest.mark.parametrize("r2", [[1], {"train": 5}, {"held_out": {"key": "x"}}], ids=str)
def test_a_map_whose_means_are_no_table_is_refused(r2, tmp_path):
    path = replace(measured.twin()[0], provenance={"r2": r2}).save(tmp_path / "a")
    with pytest.raises(UsageError, match=r"a: the map's header is not sound \("):
        CacheMap.load(path)


def test_show_blames_the_evidence_and_not_the_map(kvmap_run, tmp_path):
    path = measured.twin()[0].save(tmp_path / "a.map")
    data = {"kind": "report", "map_file_sha256": evidence.digest(path)}
    artifacts.write_json(evidence.evidence_path(path), data)
    code, text, _ = kvmap_run("show", path)
    assert (code, f"evidence: damaged; {path}.evidence.json: " in text) == (0, True)
    data |= dict.fromkeys((*evidence.FIGURES, "report_file_sha256", "figures_sha256"))
    data |= {"verdict": "recovers", "n": 1, "documents": 1, "tasks": [], "cosine": {}}
    artifacts.write_json(evidence.evidence_path(path), data | {"intervals": {}, "undefined": {}})
    code, _, error = kvmap_run("show", path)
    assert (code, f"{path}.evidence.json: the report's header is not sound" in error) == (2, True)


def test_what_was_made_before_and_is_damaged_is_made_again(tmp_path):
    assert sound_or_none(load_layers, tmp_path / "absent") is None
    (tmp_path / "damaged").write_bytes(b"half a file")
    assert sound_or_none(load_layers, tmp_path / "damaged") is None


@pytest.mark.parametrize("metadata", [{}, {"figures": 5, "labels": {}}, {"figures": {}}], ids=str)
def test_a_report_without_figures_is_refused(metadata, tmp_path):
    artifacts.write(tmp_path / "r", "report", {}, metadata)
    with pytest.raises(UsageError, match="the report's header is not sound"):
        Report.load(tmp_path / "r")


def test_one_element_of_any_stride_is_written(tmp_path):
    """Its stride says nothing, yet stops torch from looking at it as bytes."""
    odd = torch.arange(64.0).reshape(8, 8)[3:4, 5:6]
    odd = odd.as_strided((1,), (8,))
    assert odd.is_contiguous()
    tensors = {"odd": odd, "scalar": torch.tensor(2.0), "none": torch.zeros(0, 3)}
    artifacts.write(tmp_path / "a", "report", tensors, {})
    found = artifacts.open_artifact(tmp_path / "a").tensors()
    assert found["odd"].tolist() == [29.0]
    assert found["scalar"].item() == 2.0
    assert found["none"].shape == (0, 3)


# --- what must never be deleted or overwritten


def calibration_like(folder):
    folder.mkdir()
    artifacts.write_json(folder / "index.json", {"kind": "calibration"})
    (folder / "source-00000.safetensors").write_text("rows")
    return folder


def test_force_leaves_a_folder_alone_that_holds_anything_else(tmp_path):
    folder = calibration_like(tmp_path / "c")
    (folder / "thesis.txt").write_text("years")
    with pytest.raises(UsageError, match=r"c: holds 'thesis\.txt' too, and is left alone"):
        clear(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "index.json",
        "source-00000.safetensors",
        "thesis.txt",
    ]
    (folder / "thesis.txt").unlink()
    clear(folder)
    assert not folder.exists()


@pytest.mark.parametrize("text", ["{}", '{"name": "a web page"}', "not json"])
def test_force_leaves_another_program_s_index_alone(text, tmp_path):
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(UsageError, match="is no calibration, and is left alone"):
        clear(tmp_path)
    assert (tmp_path / "index.json").read_text() == text


def test_force_refuses_what_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UsageError, match="file: is no folder"):
        clear(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"


def test_force_keeps_a_calibration_that_the_new_run_cannot_replace(kvmap_run, tmp_path):
    folder = calibration_like(tmp_path / "c")
    code, _, error = kvmap_run("collect", "no-such", "tiny-l", "-o", folder, "--force")
    assert (code, "no model named 'no-such'" in error) == (2, True)
    assert (folder / "source-00000.safetensors").read_text() == "rows"
    code, _, error = kvmap_run("collect", folder, folder, "--merge", "-o", folder, "--force")
    assert code == 2
    assert (folder / "source-00000.safetensors").read_text() == "rows"


def test_a_result_cannot_be_a_folder_or_a_device_and_that_is_said_before_any_work(tmp_path):
    for path in (tmp_path, "/dev/null"):
        with pytest.raises(UsageError, match="is no ordinary file"):
            artifacts.refuse_overwrite(path, force=True)


# --- numbers


@pytest.mark.parametrize(
    "arguments",
    [
        ("collect", "a", "b", "--sequences", "0"),
        ("collect", "a", "b", "--length", "-3"),
        ("collect", "a", "b", "--held-out", "nan"),
        ("plan", "a", "b", "--stride", "0"),
        ("fit", "a", "b", "--seed", "-1"),
        ("fit", "a", "b", "--seed", "9" * 30),
        ("fit", "a", "b", "-k", "9" * 5000),
        ("eval", "m", "--min-retention", "nan"),
        ("eval", "m", "--max-kl", "inf"),
        ("eval", "m", "--length", "9" * 5000),
        ("bench", "--min-speedup", "nan"),
        ("bench", "--budget", "nan"),
        ("bench", "--budget", "-1"),
        ("bench", "--context", "9" * 5000),
    ],
    ids=lambda given: " ".join(given)[:40],
)
def test_numbers_out_of_range_are_wrong_usage(arguments, kvmap_run):
    """NaN above all: nothing is below it, so every floor would hold."""
    code, out, error = kvmap_run(*arguments)
    assert (code, out) == (2, "")
    assert arguments[-2] in error
    assert "unexpected" not in error


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99", "mps:7", ""])
def test_a_device_that_is_not_here_is_told(device):
    with pytest.raises(UsageError, match=f"no device '{device}' here; expected auto, cpu"):
        pick_device(device)


def test_devices_that_are_here_pass():
    assert pick_device("cpu") == "cpu"
    assert pick_device("spread") == "spread"


# --- names and places


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": "x"},
        {"num_hidden_layers": -1},
        {"num_attention_heads": 0, "head_dim": None},
        {"rope_parameters": {"rope_type": "zzz"}},
        {"model_type": "t5"},
        {"model_type": "zzz"},
    ],
    ids=str,
)
def test_a_config_that_makes_no_model_is_one_sentence(change, kvmap_run, tmp_path):
    config = {"model_type": "qwen3", "num_hidden_layers": 2, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    code, _, error = kvmap_run("plan", tmp_path, tmp_path)
    assert (code, "cannot load the model" in error) == (2, True), error
    assert "unexpected" not in error


@pytest.mark.parametrize("command", ["show", "fit"])
def test_a_name_longer_than_any_file_s_is_one_sentence(command, kvmap_run):
    code, _, error = kvmap_run(command, "a" * 300)
    assert (code, "unexpected" in error) == (2, False)


def test_an_empty_cache_variable_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("KVMAP_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "kvmap"


def test_a_cache_folder_that_is_a_file_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(KvmapError, match=r"maps: the folder could not be made \(Not a directory\)"):
        atomic.make_folder(tmp_path / "file" / "maps")


def test_two_processes_take_turns_and_a_killed_one_holds_up_nobody(tmp_path):
    wait = (
        "import sys, time; from pathlib import Path; from kvmap import atomic\n"
        "with atomic.alone(Path(sys.argv[1])): print('in', flush=True); time.sleep(60)"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", wait, str(tmp_path / "c")], stdout=subprocess.PIPE, text=True
    )
    with first:
        assert first.stdout.readline() == "in\n"
        entered = threading.Event()

        def second():
            with atomic.alone(tmp_path / "c"):
                entered.set()

        thread = threading.Thread(target=second)
        thread.start()
        assert not entered.wait(0.2)
        first.kill()
        assert entered.wait(30)
        thread.join()


# --- text that is none


def test_devices_are_not_read_as_text_and_pipes_are(tmp_path):
    with pytest.raises(UsageError, match="/dev/zero: is a device"):
        read_file(Path("/dev/zero"))
    reader, writer = os.pipe()
    os.write(writer, b"\xef\xbb\xbfhello")
    os.close(writer)
    assert read_file(Path(f"/dev/fd/{reader}")) == "hello"
    os.close(reader)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(UsageError, match="latin: is not UTF-8 text; convert it"):
        read_file(tmp_path / "latin")
    with pytest.raises(UsageError, match=r"cannot be read \(Is a directory\)"):
        read_file(tmp_path)


def test_bytes_that_are_no_text_are_no_prompt():
    with pytest.raises(UsageError, match="the prompt is not UTF-8 text"):
        prompt_ids(None, "caf\udce9")


class Template:
    """A tokenizer that takes any conversation; reached only by those of the right shape."""

    chat_template = "any"

    def apply_chat_template(self, messages, **_):
        return f"{messages[0]['role']}: {messages[0]['content']}"

    def __call__(self, text, **_):
        return {"input_ids": torch.ones(1, len(text))}


@pytest.mark.parametrize(
    "messages",
    [
        [],
        {},
        None,
        5,
        "user",
        [1],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": ["secret"]}],
        [{"role": 5, "content": "secret"}],
        [{"role": "user", "content": "\ud800 secret"}],
    ],
    ids=str,
)
def test_what_is_no_conversation_is_told_without_repeating_it(messages, tmp_path):
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(messages))
    with pytest.raises(UsageError, match=r"chat\.json: expected a JSON list") as told:
        message_ids(Template(), path)
    assert "secret" not in str(told.value)


def test_a_conversation_of_which_the_template_keeps_nothing_is_told(tmp_path):
    path = tmp_path / "chat.json"
    path.write_text('[{"role": "", "content": "secret"}]')
    tokenizer = Template()
    tokenizer.apply_chat_template = lambda messages, **_: messages[0]["role"]
    with pytest.raises(UsageError, match=r"chat\.json: the conversation, .* has 0 tokens"):
        message_ids(tokenizer, path)


# --- streams


def shell(line, **environment):
    """Run a shell line with `kvmap` and return it when it has ended."""
    line = line.replace("kvmap", f"{sys.executable} -m kvmap")
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, env=os.environ | environment, timeout=60
    )


def test_a_full_disk_behind_stdout_is_one_sentence_and_an_error():
    ended = shell("kvmap models > /dev/full")
    assert ended.stderr == (
        "Error: the output: could not be read or written (No space left on device)\n"
    )
    assert ended.returncode == 1


def test_streams_that_are_closed_do_no_harm():
    for line in ("kvmap models >&-", "kvmap models 2>&-", "kvmap show absent <&-"):
        ended = shell(line)
        assert "Traceback" not in ended.stderr
        assert ended.returncode == (2 if "absent" in line else 0)


def test_json_is_whole_where_the_terminal_knows_ascii_alone(tmp_path):
    artifacts.write_json(tmp_path / "é.json", {"kind": "report", "text": "ü"})
    ended = shell(f"kvmap show --json '{tmp_path}/é.json'", PYTHONIOENCODING="ascii")
    assert json.loads(ended.stdout)["metadata"]["text"] == "ü"
    assert ended.returncode == 0


# --- what holds the user's text


def test_a_journal_is_private_however_it_comes_about(tmp_path):
    journal = Journal.open(tmp_path / "j", "f")
    assert os.stat(tmp_path / "j").st_mode & 0o777 == 0o600
    (tmp_path / "j").unlink()  # by another process that has finished
    journal.put("task", "item", {"unit": 0})
    assert os.stat(tmp_path / "j").st_mode & 0o777 == 0o600
    first, second = (tmp_path / "j").read_text().splitlines()
    assert json.loads(first) == {"fingerprint": "f"}
    assert json.loads(second)["kept"] == {"unit": 0}


def test_nothing_here_can_run_code_that_a_file_brings():
    """Safetensors and JSON alone are read; transformers is told so too."""
    for path in Path(command.__file__).parents[1].rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not any(word in text for word in ("import pickle", "torch.load(")), path
        if "models" in path.parts:
            loads = text.count("ForCausalLM.from_pretrained(")
            assert loads == text.count("use_safetensors=True"), path
