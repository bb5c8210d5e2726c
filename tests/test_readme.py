"""The README tells the truth: its tables are current and its blocks run."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from safetensors import safe_open

from kvmap import models
from kvmap.cli import app
from kvmap.header import MADE_BY

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def load_script():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "examples" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


readme = load_script()
WALK = [line[2:] for line in readme.section(TEXT, "walk").splitlines() if line.startswith("$ ")]
needs_weights = pytest.mark.skipif(
    not all(
        (Path(models.resolve(name).location) / "model.safetensors").exists()
        for name in ("tiny-m", "tiny-l")
    ),
    reason="the embedded models are not here",
)


def test_the_generated_parts_are_current():
    """Run `make format`, or `python examples/readme.py`, where this fails."""
    assert readme.section(TEXT, "commands") == readme.command_table()
    assert readme.section(TEXT, "tree") == readme.source_tree()


def test_every_command_line_in_it_parses():
    group = typer.main.get_command(app.app)
    lines = re.findall(r"(?:^\$ |`)(kvmap [a-z-]+ [^`\n$]+)", TEXT, re.MULTILINE)
    assert len(lines) > 8
    for line in lines:
        _, name, *arguments = shlex.split(line)
        group.commands[name].make_context(name, arguments)


def test_every_kind_of_artifact_is_described():
    rows = set(re.findall(r"^\| (\w+) \|", TEXT, re.MULTILINE))
    assert set(MADE_BY) - {"run", "polish"} <= rows


def described(kind: str) -> list[re.Pattern]:
    """Return the names of tensors that README gives for a kind of artifact."""
    row = re.search(rf"^\| {kind} \| (.*) \|$", TEXT, re.MULTILINE)[1]
    choice = lambda found: f"({found[1].replace(',', '|')})" if "," in found[1] else r"[\w.]+"  # noqa: E731
    names = [name.replace(".", r"\.") for name in re.findall(r"`([^`]+)`", row)]
    return [re.compile(re.sub(r"\{([^}]+)\}", choice, name)) for name in names]


def test_the_tensors_of_every_kind_are_those_of_its_files(kvmap_run, planted_paths, tmp_path):
    pair = planted_paths("twin_llama")
    rows, folder, layers, cache = (tmp_path / n for n in ("t.jsonl", "calib", "layers", "cache"))
    texts = (f"{i} times {i} is {i * i}, " * 4 for i in range(99))
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    text = ["--dataset", rows, "--sequences", 12, "--length", 48, "--stride", 1]
    whole, low, bent = (tmp_path / f"{name}.map" for name in ("whole", "low", "bent"))
    for line in (
        ["collect", *pair, *text, "-o", folder],
        ["select-layers", folder, "-k", 1, "-o", layers],
        ["fit", folder, "--layers", layers, "--rank", "full", "-o", whole],
        ["fit", folder, "--layers", layers, "--rank", 8, "-o", low],
        ["fit", folder, "--layers", layers, "--method", "residual", "--width", 2, "-o", bent],
        ["transfer", low, "--prompt", "a context of some length", "-o", cache],
    ):
        code, _, error = kvmap_run(*line)
        assert code == 0, error
    found: dict[str, set[str]] = {}
    for path in (*folder.glob("*.safetensors"), layers, whole, low, bent, cache):
        with safe_open(path, "pt") as file:
            kind = json.loads(file.metadata()["kvmap"])["kind"]
            found.setdefault(kind, set()).update(file.keys())
    assert set(found) == set(MADE_BY) - {"calibration", "run", "polish", "lowest", "report"}
    for kind, names in found.items():
        patterns = described(kind)
        strange = {name for name in names if not any(p.fullmatch(name) for p in patterns)}
        unseen = [p.pattern for p in patterns if not any(map(p.fullmatch, names))]
        assert (strange, [p for p in unseen if p != "mask"]) == (set(), []), kind


@needs_weights
def test_its_blocks_run_one_after_the_other(tmp_path):
    for line in WALK:
        readme.run(line, tmp_path)
    block = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1]
    (tmp_path / "library.py").write_text(block)
    answer = readme.run("python library.py", tmp_path).stdout
    assert len(answer.split()) == 1
