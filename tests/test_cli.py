"""The command line's conventions: exit codes, what goes where, and help that can be trusted."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from transformers import dynamic_module_utils

import kvmap
from kvmap import collect_pair
from kvmap.bench.shapes import random_map
from kvmap.cli import app as command
from kvmap.cli import inputs, output
from kvmap.collect_options import CollectOptions
from kvmap.collect_pair import Loading, TextOptions
from kvmap.errors import FloorMissed, KvmapError, UsageError
from kvmap.evaluate.tasks import READ_BY, is_read
from kvmap.fit import DEFAULT_RECIPE, METHODS, RECIPES

GROUP = typer.main.get_command(command.app)
SHARED = {
    "--output": "-o",
    "--quiet": "-q",
    "--force": "-f",
    "--dry-run": "-n",
    "--help": "-h",
    "-k": "-k",
}


@pytest.mark.parametrize("name", command.COMMANDS)
def test_help_begins_with_a_sentence_and_ends_with_two_examples_that_parse(name, kvmap_run):
    code, text, error = kvmap_run(name, "--help")
    assert (code, error) == (0, "")
    first = text.splitlines()[2].strip()
    assert first[0].isupper()
    assert first.endswith((".", ",", ":")) or len(first) > 60
    examples = text.partition("Examples:\n")[2].strip().splitlines()
    assert len(examples) == 2
    for example in examples:
        program, sub, *arguments = shlex.split(example)
        assert (program, sub) == ("kvmap", name)
        GROUP.commands[name].make_context(name, arguments)


def test_the_help_lists_every_command_with_a_whole_sentence(kvmap_run):
    code, text, _ = kvmap_run("--help")
    assert code == 0
    for name in command.COMMANDS:
        line = next(line for line in text.splitlines() if line.startswith(f"  {name} "))
        assert line.endswith(".")
        assert not line.endswith("...")


@pytest.mark.parametrize("name", command.COMMANDS)
def test_options_are_spelt_alike_everywhere(name):
    for parameter in GROUP.commands[name].params:
        for option in parameter.opts:
            if option in SHARED:
                assert SHARED[option] in parameter.opts
            elif not option.startswith("--") and option.startswith("-"):
                assert option in SHARED.values()


@pytest.mark.parametrize("name", command.COMMANDS)
def test_defaults_that_help_states_are_the_library_s(name):
    stated = {
        "--stride": CollectOptions.stride,
        "--held-out": CollectOptions.held_out,
        "--sequences": TextOptions.sequences,
        "--length": TextOptions.length,
        "--seed": TextOptions.seed,
        "--device": Loading.device,
        "--dtype": Loading.dtype,
        "--recipe": DEFAULT_RECIPE,
    }
    for parameter in GROUP.commands[name].params:
        option = parameter.opts[0]
        if option in stated and "[default: " in (parameter.help or ""):
            assert f"[default: {stated[option]}]" in parameter.help, option


@pytest.mark.parametrize(("option", "names"), [("--recipe", RECIPES), ("--method", METHODS)])
def test_help_names_every_recipe_and_method(option, names):
    found = next(p for p in GROUP.commands["fit"].params if option in p.opts)
    said = f"{found.metavar} {found.help}"
    assert all(name in said for name in names if name != "closed-form")


def test_wrong_usage_ends_with_code_2(kvmap_run):
    for arguments, problem in [
        (["modls"], "No such command 'modls'. Did you mean 'models'?"),
        (["models", "--jsn"], "No such option: --jsn"),
        (["show"], "Missing argument 'FILE'"),
        (["fit", "a", "b", "-k", "many"], "found -k 'many', expected a number from 1, or auto"),
        (["fit", "a", "b", "--ridge", "-1"], "found --ridge '-1', expected a number from 0"),
        (["fit", "a", "b", "--rank", "0"], "found --rank '0', expected a number from 1, a share"),
        (["fit", "a", "b", "--rank", "2.5"], "found --rank '2.5', expected a number from 1"),
        (
            ["fit", "a", "b", "--lookback-layers", "0,-1"],
            "found --lookback-layers '0,-1', expected numbers of layers joined by commas",
        ),
        (["fit", "a", "b", "--method", "x"], "found --method 'x', expected top or greedy or mlp"),
        (["fit", "a", "b", "--heads", "some"], "found --heads 'some', expected all or matched"),
        (["fit", "a", "b", "--native-tail", "0"], "found --native-tail 0, expected at least 1"),
        (["fit", "a", "b", "--recipe", "best"], "no recipe 'best'; expected one of"),
        (["fit", "a", "--sequences", "3"], "--sequences is for two models"),
        (["fit", "absent"], "absent: "),
        (["plan", "tiny-x", "tiny-l"], "did you mean tiny-"),
        (["show", "absent.map"], "absent.map: no such file; run `kvmap "),
        (["transfer", "absent.map"], "expected one context, found 0"),
        (["transfer", "absent.map", "--prompt", "a"], "nothing to do; pass -o CACHE"),
        (["transfer", "x", "--prompt", "a", "-o", "y", "--compare"], "pass --generate N with it"),
        (
            ["transfer", "absent.map", "--prompt", "a", "--generate", "2"],
            "absent.map: no such file",
        ),
        (["collect", "a", "b", "--merge"], "--merge writes a new calibration; say where"),
    ]:
        code, text, error = kvmap_run(*arguments)
        assert problem in error, arguments
        assert (code, text) == (2, ""), arguments
        assert "Traceback" not in error


IGNORED = [
    ("fit a b --plot x.png", "--plot draws what --frontier or --budget measures"),
    ("fit a b --assign best", "--assign pairs matched heads, and this map's read all"),
    ("fit a b --recipe paper --assign 0,1", "--assign pairs matched heads"),
    ("fit a b --width 8", "--width is of networks, and there are none"),
    ("fit a b --method mlp --rank 8", "--rank is of linear maps, and networks keep theirs whole"),
    ("fit a b --method mlp --weights attention", "--weights is of linear maps"),
    ("fit a b --layers l -k 2", "-k chooses layers, and they are chosen already"),
    ("fit a --layers l --method greedy", "--method chooses layers, and they are chosen already"),
    ("fit a b --recipe kvmap-native --no-exact-first", "--no-exact-first would map layer 0"),
    ("fit a --device cpu", "--device is of models, and a fit of this calibration runs none"),
    ("fit a --method mlp --dtype float32", "--dtype is of models, and a fit of this calibration"),
    ("fit a -n --trust-remote-code", "--trust-remote-code is of models, and a fit of this"),
    ("fit a --frontier --budget 0.1", "--budget fits the best map and --frontier fits none"),
    ("fit a b --recipe paper --lookback-layers 1", "--lookback-layers is of tokens before, and"),
    ("fit a --frontier --lookback-layers 1", "--lookback-layers is what --frontier and --budget"),
    ("fit a --frontier --rank 8", "--rank is what --frontier and --budget vary; leave it out"),
    ("fit a --frontier -o m", "--output is of a map, and --frontier fits none"),
    ("fit a --frontier -k 2", "-k is what --frontier and --budget vary"),
    ("fit a --budget 0.1 --no-joint", "--no-joint is what --frontier and --budget vary"),
    ("fit a --budget 0.1 --layers l", "--layers is what --frontier and --budget vary"),
    ("collect a b --merge -o c --stride 1", "--stride is what merged calibrations have already"),
    ("collect a b --merge -o c --no-joint", "--no-joint is what merged calibrations have"),
    ("collect a b --merge -o c -n", "--dry-run is what merged calibrations have already"),
    ("collect a b --merge -o c --trust-remote-code", "--trust-remote-code is what merged calib"),
    ("collect a b --no-moments --products float32", "--products is of moments, and --no-moments"),
    ("select-layers a --method mlp", "found --method 'mlp', expected top or greedy"),
    ("eval m --predict --min-cosine 0.9", "--min-cosine is of tasks, and --predict runs none"),
    ("eval m --predict --sign", "--sign is of tasks, and --predict runs none"),
    ("eval m --messages c --data d", "--data is read by no task beside --messages"),
    ("eval m --few-shot 2", "--few-shot is read by none of the tasks demo"),
    ("eval m --tasks wikitext2 --text t", "--text is read by none of the tasks wikitext2"),
    ("eval m --tasks demo,needle --turn 2", "--turn is read by none of the tasks demo, needle"),
    ("eval m --data d", "--data is read by none of the tasks demo"),
    ("eval m --tasks coqa --length 64", "--length is read by none of the tasks coqa"),
    ("eval m --alternate b", "--alternate is read by none of the tasks demo"),
    ("eval m --history gold", "--history is read by none of the tasks demo"),
    ("bench m --recipe paper", "--recipe says which map to make, and MAP is made already"),
    ("bench --random-weights --trust-remote-code", "--trust-remote-code is of checkpoints, and"),
    ("bench --only fit --trust-remote-code", "--trust-remote-code is of checkpoints, and --random"),
    ("transfer m --cache c --lowest l -o x --device spread", "--device spread is of whole models"),
    ("transfer m --cache c --lowest l -o x --trust-remote-code", "and beside --cache and --lowest"),
    ("bench --repeats 2 --budget 3", "--budget is time, and --repeats counts rounds instead"),
]


@pytest.mark.parametrize(("line", "said"), IGNORED, ids=[line for line, _ in IGNORED])
def test_an_option_that_would_be_ignored_is_refused(kvmap_run, line, said):
    code, text, error = kvmap_run(*line.split())
    assert said in error
    assert (code, text, len(error.splitlines())) == (2, "", 1)


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (("demo", "coqa"), {"lengths", "data", "turn", "history", "alternate"}),
        (("mmlu",), {"data", "text", "few_shot"}),
        (("text",), {"lengths", "text"}),
    ],
)
def test_an_option_is_read_where_one_task_reads_it(names, options):
    assert {option for option in READ_BY if is_read(option, names)} == options


NO_ROOM = "there is not enough memory; --dry-run says what is needed"


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KvmapError("the disk is full"), 1, "Error: the disk is full\n"),
        (UsageError("no such model"), 2, "Error: no such model\n"),
        (FloorMissed("retention 0.5 is below 0.9"), 3, "Error: retention 0.5 is below 0.9\n"),
        (KeyboardInterrupt(), 130, ""),
        (MemoryError(), 1, f"Error: {NO_ROOM}\n"),
        (torch.OutOfMemoryError("CUDA out of memory"), 1, f"Error: {NO_ROOM}\n"),
        (RuntimeError("CPUAllocator: can't allocate memory: you"), 1, f"Error: {NO_ROOM}\n"),
        (
            ZeroDivisionError("by zero\nand more"),
            1,
            "Error: unexpected ZeroDivisionError: by zero; "
            "run it with KVMAP_DEBUG=1 for the traceback\n",
        ),
    ],
)
def test_how_a_command_failed_is_told_by_its_code_and_one_sentence(
    kvmap_run, monkeypatch, raised, code, said
):
    def document(*_):
        raise raised

    monkeypatch.setattr(output.Output, "document", document)
    assert kvmap_run("models") == (code, "", said)


def test_debugging_shows_the_traceback(kvmap_run, monkeypatch):
    monkeypatch.setenv("KVMAP_DEBUG", "1")
    with pytest.raises(UsageError, match=r"absent\.map"):
        command.main(["show", "absent.map"])


def test_json_is_one_document_without_nan(kvmap_run, capsys):
    code, text, error = kvmap_run("models", "--json")
    assert (code, error) == (0, "")
    assert {"name": "tiny-s", "location": "in this package"} in json.loads(text)["models"]
    output.Output(as_json=True).document({"nll": float("nan"), "kl": [float("inf"), 1.0]}, str)
    assert json.loads(capsys.readouterr().out) == {"nll": None, "kl": [None, 1.0]}


def test_quiet_silences_all_but_data(capsys):
    loud, quiet = output.Output(), output.Output(quiet=True)
    for out in (loud, quiet):
        out.note("a hint")
        out.result("x.map", {"map": "x.map"})
        with out.progress() as progress:
            progress("fit", 1, 2)
    assert capsys.readouterr() == ("x.map\nx.map\n", "a hint\n")


def test_what_is_piped_is_never_folded(monkeypatch, kvmap_run):
    monkeypatch.setenv("COLUMNS", "20")
    _, text, _ = kvmap_run("models")
    assert any("SmolLM2-135M-Instruct" in line for line in text.splitlines())
    lines = output.table(("name", "n"), [("x" * 300, 1.0), ("y", None)]).splitlines()
    assert lines[1] == "x" * 300 + "  1.000"
    assert lines[2].endswith("-")


def test_numbers_are_written_for_people():
    assert [output.amount(n) for n in (0, 999, 1234, 5.3e9, 2e13)] == [
        "0 B", "999 B", "1.2 KB", "5.3 GB", "20.0 TB",
    ]  # fmt: skip
    assert [output.large(n) for n in (7, 1234, 3.2e9, 4e16)] == ["7", "1.2 k", "3.2 G", "40.0 P"]
    assert [output.figure(x) for x in (None, float("nan"), 0.12345)] == ["-", "-", "0.123"]


def test_the_heat_table_marks_what_is_chosen():
    plain = output.heat([[0.5, -0.1]], [[0]], colour=False)
    assert plain.splitlines()[-1] == "   0  0.50*-0.10 "
    assert "\x1b[48;5;" in output.heat([[0.5, -0.1]], [[0]], colour=True)


def test_whole_weights_are_recorded_as_no_rank():
    """0, as it was recorded, would be a rank of nothing."""
    assert inputs.edited_recipe(None, {"rank": inputs.rank_or_share("full")}, {}).rank is None
    assert inputs.edited_recipe(None, {"rank": None}, {}).rank == 0.01
    assert inputs.edited_recipe(None, {"rank": inputs.rank_or_share("8")}, {}).rank == 8


def test_only_what_was_asked_for_changes_a_recipe():
    made = inputs.edited_recipe("paper", {"k": 3, "ridge": None}, {"anchor": False, "heads": None})
    assert made.k == 3
    assert made.ridge == RECIPES["paper"].ridge
    assert made.options == RECIPES["paper"].options
    changed = inputs.edited_recipe(None, {}, {"native_tail": 9})
    assert changed.options.native_tail == 9
    assert changed.k == RECIPES[DEFAULT_RECIPE].k


def test_a_reader_that_leaves_is_no_error():
    environment = {**os.environ, "PYTHONPATH": str(Path(kvmap.__file__).parents[1])}
    line = f"{shlex.quote(sys.executable)} -m kvmap --help | head -n 1"
    ended = subprocess.run(line, shell=True, capture_output=True, text=True, env=environment)
    assert ended.stdout.startswith("Usage: kvmap")
    assert ended.stderr == ""


@pytest.mark.parametrize(
    "option", ["--recipe cachebridge", "--polish 1", "--frontier", "--budget 0.1", "b"]
)
def test_how_models_are_loaded_is_taken_where_a_fit_runs_them(kvmap_run, option):
    code, _, error = kvmap_run("fit", "absent", *option.split(), "--device", "cpu")
    assert code == 2
    assert "is of models" not in error


def test_a_device_that_is_not_here_is_refused_where_no_model_is_run(kvmap_run):
    code, _, error = kvmap_run("fit", "x.calib", "--device", "tpu:7")
    assert (code, "no device 'tpu:7' here" in error) == (2, True)


@pytest.mark.parametrize(
    "command",
    [
        ("fit", "x.calib"),
        ("fit", "tiny-m", "tiny-l"),
        ("bench", "--pair", "tiny-m,tiny-l", "-n"),
        ("plan", "tiny-m", "tiny-l"),
        ("collect", "tiny-m", "tiny-l", "-n"),
    ],
)
def test_models_are_shared_only_by_processes_that_collect(kvmap_run, command):
    code, _, error = kvmap_run(*command, "--device", "tensor-parallel")
    assert (code, "expected it only where several processes collect" in error) == (2, True)


def test_a_reader_that_never_came_is_no_error():
    environment = {**os.environ, "PYTHONPATH": str(Path(kvmap.__file__).parents[1])}
    read, write = os.pipe()
    os.close(read)
    for name in ("--help", "models"):
        line = [sys.executable, "-m", "kvmap", name]
        ended = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, env=environment)
        assert (ended.returncode, ended.stderr) == (0, b""), name
    os.close(write)


@pytest.mark.parametrize("stream", ["/dev/full", "gone"])
def test_what_nobody_can_read_on_stderr_changes_nothing(stream, tmp_path):
    """Notes come before the work is done: it went undone once, with code 0."""
    environment = {**os.environ, "PYTHONPATH": str(Path(kvmap.__file__).parents[1])}
    read, write = os.pipe()
    os.close(read)
    where = write if stream == "gone" else os.open(stream, os.O_WRONLY)
    code = "from kvmap.cli.output import Output, complain; Output().note('x'); complain('y')"
    line = [sys.executable, "-c", f"{code}; print('done')"]
    ended = subprocess.run(line, stdout=subprocess.PIPE, stderr=where, env=environment)
    assert (ended.returncode, ended.stdout) == (0, b"done\n")
    line = [sys.executable, "-m", "kvmap", "show", tmp_path / "missing"]
    assert subprocess.run(line, stderr=where, env=environment).returncode == 2
    os.close(where)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Write varied rows of text."""
    path = tmp_path_factory.mktemp("text") / "rows.jsonl"
    words = ["a", "planted", "pair", "is", "linear", "so", "any", "map", "must", "be", "found"]
    rows = [" ".join(words[(i * j) % len(words)] for j in range(1, 40)) for i in range(1, 40)]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def test_the_whole_way_on_a_planted_pair(kvmap_run, planted_paths, text, tmp_path):
    """Each step takes the path that the step before printed; every contract key is there."""
    source, target = planted_paths("twin_qwen3")
    read = ["--dataset", text, "--sequences", 24, "--length", 48, "--stride", 1]

    code, path, error = kvmap_run("collect", source, target, *read)
    assert (code, path.count("\n")) == (0, 1), error
    calibration = path.strip()
    code, again, error = kvmap_run("collect", source, target, *read, "--json")
    document = json.loads(again)
    assert document["calibration"] == calibration
    assert document["reused"] == ["collect"]
    assert document["tokens"] == 24 * 48
    assert {"bytes", "seconds"} <= set(document)

    layers = tmp_path / "x.layers"
    code, made, error = kvmap_run("select-layers", calibration, "-k", 1, "-o", layers, "--json")
    document = json.loads(made)
    assert (document["layers"], document["k"]) == (str(layers), 1)
    assert {"train", "held_out"} <= set(document["r2"])
    assert "held-out R²" in error

    cmap = tmp_path / "x.map"
    arguments = ["fit", calibration, "--layers", layers, "--recipe", "paper", "--ridge", "1e-9"]
    code, made, error = kvmap_run(*arguments, "-o", cmap, "--json")
    document = json.loads(made)
    assert document["map"] == str(cmap)
    assert document["r2"]["held_out"]["key"] > 0.999
    keys = {"map", "layers", "k", "ridge", "r2", "rows_per_input", "seconds", "reused"}
    assert keys <= set(document)
    assert "R² of keys: 1.000 held out" in error
    code, _, error = kvmap_run(*arguments, "-o", cmap)
    assert (code, "exists already; pass --force" in error) == (2, True)

    code, shown, _ = kvmap_run("show", cmap)
    assert code == 0
    assert "layers.0.key.weight" in shown
    options = next(line for line in shown.splitlines() if line.startswith("options "))
    assert re.search(r" heads (all|matched), .*native_head \d", options), options
    assert json.loads(kvmap_run("show", cmap, "--json")[1])["kind"] == "map"
    assert "* chosen" in kvmap_run("show", layers)[1]
    assert "moments.safetensors" in kvmap_run("show", calibration)[1]

    cache = tmp_path / "x.cache"
    prompt = ["--prompt", "a planted pair is known to be linear"]
    code, made, error = kvmap_run("transfer", cmap, *prompt, "-o", cache)
    assert (code, made) == (0, f"{cache}\n"), error
    assert "applied: 36 tokens" in error
    code, made, _ = kvmap_run("transfer", cmap, *prompt, "--generate", 4, "--compare", "--json")
    document = json.loads(made)
    assert document["outcome"] == "applied"
    assert document["text"]["mapped"] == document["text"]["native"]
    assert kvmap_run("transfer", cmap, "--cache", cache, "--generate", 2)[0] == 2
    code, _, error = kvmap_run("transfer", cmap, *prompt, "--generate", 99999)
    assert (code, "context with continuation needs 100035 positions, but" in error) == (2, True)
    assert json.loads(kvmap_run("show", cache, "--json")[1])["kind"] == "cache"


def test_a_fit_from_names_reuses_its_stages(kvmap_run, planted_paths, text):
    source, target = planted_paths("twin_llama")
    asked = ["fit", source, target, "--dataset", text, "--sequences", 12, "--length", 32, "--json"]
    first = json.loads(kvmap_run(*asked, "-k", 1)[1])
    second = json.loads(kvmap_run(*asked, "-k", 1)[1])
    assert first["reused"] == []
    assert second["reused"] == ["collect", "select-layers", "fit"]
    assert second["map"] == first["map"]
    other = json.loads(kvmap_run(*asked, "-k", 2)[1])
    assert other["reused"] == ["collect"]
    assert json.loads(kvmap_run(*asked, "-k", 1, "--seed", 1)[1])["reused"] == second["reused"]


def test_plans_cost_nothing_and_say_what_they_would(kvmap_run, planted_paths):
    source, target = planted_paths("image")
    code, text_, error = kvmap_run("plan", source, target)
    assert (code, error) == (0, "")
    assert "can be paired" in text_
    found = json.loads(kvmap_run("plan", source, target, "--json")[1])
    assert found["pairable"] is True
    cost = json.loads(kvmap_run("collect", source, target, "--dry-run", "--json")[1])
    assert {"disk_bytes", "peak_bytes", "flops", "seconds"} <= set(cost)
    assert "recipe" in kvmap_run("fit", source, target, "-n")[1]


@pytest.mark.parametrize(
    "command", [("plan",), ("collect", "-n"), ("collect", "-o", "calib"), ("fit", "-n"), ("fit",)]
)
def test_sequences_longer_than_a_model_reads_are_refused_alike(command, kvmap_run):
    code, _, said = kvmap_run(*command, "tiny-m", "tiny-l", "--length", 32769)
    assert (code, said.count("\n")) == (2, 1)
    assert "--length needs 32769 positions, but tiny-m reads at most 32768; give a smaller" in said


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("collect", "-o", "X"), "token ids of 900000000 sequences of 1024 tokens .* of memory"),
        (("collect", "--no-dump"), "token ids of 900000000 sequences of 1024 tokens .* of memory"),
        (("fit",), "token ids of 900000000 sequences .* are free here; give fewer --sequences"),
        (("collect", "-o", "X", "--sequences", 9), "X: 9 sequences .* there, .* free; give fewer"),
        (("fit", "--sequences", 9), "calibrations: 9 sequences .* there, .* free; give fewer"),
    ],
    ids=str,
)
def test_what_cannot_fit_is_refused_before_text_is_read(command, said, kvmap_run, monkeypatch):
    """As lack of space is when it is met: an error, and no wrong usage."""

    def never(*_):
        raise AssertionError("text was read")

    monkeypatch.setattr(collect_pair.text, "documents", never)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**6))
    name, *given = command
    most = () if "--sequences" in given else ("--sequences", 900000000)
    code, out, error = kvmap_run(name, "tiny-m", "tiny-l", *given, *most)
    assert (code, out, error.count("\n")) == (1, "", 1)
    assert re.search(said, error), error
    assert kvmap_run(name, "tiny-m", "tiny-l", *given, *most, "-n")[0] == 0


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("collect", "-n", "--held-out", 7), "--held-out is 7.0, expected a share"),
        (
            ("collect", "-n", "--sequences", 1),
            "found 1 sequences of 1024 tokens, expected at least",
        ),
        (("collect", "-n", "--no-dump", "--no-moments"), "together leave nothing to keep"),
        (("collect", "-n", "--length", 4), "none is left after the first 4"),
        (("fit", "-n", "--native-layers", 99), "leaves nothing to map: the target has 5 layers"),
        (("fit", "-n", "--polish", "9" * 400), "expected 0 to 1000000000"),
        (("fit", "-n", "--method", "mlp", "--width", "9" * 400), "expected 1 to 1000000000"),
        (("plan", "--sequences", "9" * 400), "less than or equal to 1000000000"),
        (
            ("collect", "--no-joint", "--no-dump", "--lookback-layers", 1),
            "--lookback-layers is of rows or joint moments, and neither is kept",
        ),
    ],
)
def test_plans_refuse_what_the_work_would(command, said, kvmap_run):
    code, out, error = kvmap_run(*command, "tiny-m", "tiny-l")
    assert (code, out) == (2, "")
    assert said in error


@pytest.mark.parametrize(
    "how",
    [("--only", "soup"), ("--against", "soup"), ("--repeats", 0), ("--plot", "/nowhere/x.png")],
)
def test_a_bench_is_not_planned_that_could_not_run(how, kvmap_run):
    assert kvmap_run("bench", "-n", *how)[:2] == (2, "")


@pytest.mark.parametrize("command", [("plan",), ("fit", "-n"), ("collect", "-n")])
def test_a_pair_that_cannot_be_is_refused_after_saying_why(
    kvmap_run, checkpoint, planted_paths, command
):
    source, _ = planted_paths("twin_llama")
    text = () if command == ("plan",) else ("--dataset", "demo")
    code, text_, error = kvmap_run(*command, source, checkpoint("other_tokenizer"), *text)
    assert code == 2
    assert ("cannot be paired" in text_) == (command == ("plan",))
    assert "FLOP" not in text_
    assert "cannot be paired: the tokenizers differ" in error


CODE = """from transformers import Qwen3Config, Qwen3ForCausalLM


class OursConfig(Qwen3Config):
    model_type = "ours"


class OursForCausalLM(Qwen3ForCausalLM):
    config_class = OursConfig
"""


@pytest.fixture
def ours(checkpoint, tmp_path, monkeypatch):
    """Return a checkpoint that brings code of its own, which would be copied to `modules`."""
    folder = shutil.copytree(checkpoint("qwen3_small"), tmp_path / "ours")
    (folder / "ours.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "ours", "architectures": ["OursForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "ours.OursConfig",
        "AutoModelForCausalLM": "ours.OursForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


def test_code_that_a_checkpoint_brings_runs_only_if_asked(kvmap_run, ours, tmp_path):
    folder = ours
    code, text_, error = kvmap_run("plan", folder, folder)
    assert (code, text_) == (2, "")
    assert "brings code of its own; read it, and pass --trust-remote-code to run it" in error
    assert not (tmp_path / "modules").exists()
    code, text_, error = kvmap_run("plan", folder, folder, "--trust-remote-code")
    assert (code, error) == (0, "")
    assert "can be paired" in text_
    trusted = Loading(device="cpu", trust_remote_code=True).open(str(folder))
    assert type(trusted.model).__name__ == "OursForCausalLM"


def test_a_bench_runs_code_that_a_checkpoint_brings_only_if_asked(kvmap_run, ours, tmp_path):
    pair = ("bench", "--pair", f"{ours},{ours}", "--context", "16", "--dry-run")
    code, text_, error = kvmap_run(*pair)
    assert (code, text_) == (2, "")
    assert "brings code of its own; read it, and pass --trust-remote-code to run it" in error
    assert not (tmp_path / "modules").exists()
    assert kvmap_run(*pair, "--trust-remote-code")[0] == 0

    signature = Loading("cpu", trust_remote_code=True).open(str(ours)).signature
    shape = RECIPES["paper"], torch.device("cpu"), torch.float32
    made = random_map((signature, signature), *shape).save(tmp_path / "a.map")
    timed = ("bench", made, "--context", "16", "--repeats", 1)
    for part in ((), ("--only", "stream")):
        code, text_, error = kvmap_run(*timed, *part)
        assert (code, text_, "brings code of its own" in error) == (2, "", True)
        code, text_, error = kvmap_run(*timed, *part, "--trust-remote-code")
        assert (code, str(ours.name) in text_) == (0, True), error


LAYERS = 3  # of the source of the planted pair


@pytest.fixture
def collected(kvmap_run, planted_paths, text, tmp_path):
    """Return the folder of a small calibration of models with few layers."""
    shape = ("--dataset", text, "--sequences", 12, "--length", 32, "--stride", 1)
    made = tmp_path / "calib"
    assert kvmap_run("collect", *planted_paths("twin_llama"), *shape, "-o", made)[0] == 0
    return made


def test_more_layers_than_the_source_has_are_refused_where_they_are_asked_for(
    kvmap_run, collected, planted_paths
):
    names = planted_paths("twin_llama")
    said = rf"found -k 99, .*twin_llama-source has {LAYERS} layers; give at most {LAYERS}, or auto"
    fits = [("fit", *names), ("fit", *names, "-n"), ("fit", collected), ("fit", collected, "-n")]
    for asked in (*fits, ("select-layers", collected)):
        code, out, error = kvmap_run(*asked, "-k", 99)
        assert (code, out) == (2, ""), asked
        assert re.search(said, error), error


def test_a_preset_that_the_source_caps_says_so(kvmap_run, collected, planted_paths, tmp_path):
    said = f"k = 8 is capped at the source's {LAYERS} layers\n"
    layers = tmp_path / "layers"
    for asked in (
        ("fit", *planted_paths("twin_llama"), "-n"),
        ("fit", collected),
        ("select-layers", collected, "-o", layers),
    ):
        code, _, error = kvmap_run(*asked, "--recipe", "paper")
        assert (code, error.count(said)) == (0, 1), error
    for more in (("--layers", layers), ("-k", LAYERS), ("-k", "auto")):
        assert said not in kvmap_run("fit", collected, "--recipe", "paper", *more)[2]


def test_a_model_alone_is_told_that_its_target_is_missing(kvmap_run, planted_paths):
    for name in ("qwen3-8b", "Qwen/Qwen3-8B", "tiny-m", planted_paths("twin_llama")[0]):
        code, out, error = kvmap_run("fit", name, "--sequences", 9)
        assert (code, out) == (2, "")
        assert f"{name} is a model, and TARGET is missing; run `kvmap fit {name} TARGET`" in error
    assert "found no calibration" in kvmap_run("fit", "absent")[2]


def test_few_rows_for_one_layer_are_not_told_to_take_fewer(kvmap_run, collected):
    few = "warning: fewer than 4 rows per input; in-sample R² says nothing here: give more"
    said = {k: kvmap_run("fit", collected, "--heads", "all", "-k", k)[2] for k in (1, 2)}
    assert f"{few} --sequences\n" in said[1]
    assert f"{few} --sequences or a smaller -k\n" in said[2]


def test_a_frontier_tells_of_each_candidate_as_it_goes(kvmap_run, collected):
    code, out, error = kvmap_run("fit", collected, "--frontier", "--recipe", "paper")
    assert code == 0
    lines = error.splitlines()
    assert lines[0].startswith(f"1 of {len(lines)}: all heads, k 1, rank +1% error: KL ")
    assert lines[-1].startswith(f"{len(lines)} of {len(lines)}: matched heads, ")
    assert out.startswith("frontier")
    quiet = kvmap_run("fit", collected, "--frontier", "--recipe", "paper", "-q")
    assert (quiet[0], quiet[2]) == (0, "")


def test_help_tells_the_two_things_apart_that_a_method_is(kvmap_run):
    said = " ".join(kvmap_run("fit", "--help")[1].split())
    assert "how layers are chosen, top or greedy" in said
    assert "which network is fitted instead, mlp or residual" in said
