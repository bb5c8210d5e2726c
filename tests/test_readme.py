"""The README tells the truth: its tables are current and its blocks run."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer

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


@needs_weights
def test_its_blocks_run_one_after_the_other(tmp_path):
    for line in WALK:
        readme.run(line, tmp_path)
    block = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)[1]
    (tmp_path / "library.py").write_text(block)
    answer = readme.run("python library.py", tmp_path).stdout
    assert len(answer.split()) == 1
