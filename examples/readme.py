"""Write the parts of README.md that are made by a machine: tables, the tree, real output.

python examples/readme.py             the command table and the source tree
python examples/readme.py --walk      also every `$` line and what it prints
python examples/readme.py --results   also the table of results: fits and evaluates (minutes)
"""

import ast
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from kvmap.cli import app

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAIRS = (("tiny-m", "tiny-l"), ("tiny-s", "tiny-l"), ("tiny-l", "tiny-m"))
RECIPES = ("paper", "cachebridge", "kvmap")
FIT = "--sequences 200 --length 512 --stride 1"
EVAL = "--limit 100"


def command_table() -> str:
    """List the commands with what they do and print."""
    import typer

    group = typer.main.get_command(app.app)
    rows = ["| command | does |", "|---|---|"]
    for name, command in group.commands.items():
        sentence = command.help.strip().split("\n\n")[0].replace("\n", " ").rstrip(".")
        rows.append(f"| `kvmap {name}` | {sentence} |")
    return "\n".join(rows)


def source_tree() -> str:
    """List the source files, each with the first clause of its docstring."""
    folder = ROOT / "src" / "kvmap"
    files = sorted(folder.rglob("*.py"), key=lambda p: (len(p.relative_to(folder).parts) > 1, p))
    lines = [f"{file.relative_to(folder)!s:<30} {first_clause(file)}" for file in files]
    return "\n".join(["```", "src/kvmap/", *lines, "```"])


def first_clause(file: Path, width: int = 80) -> str:
    """Return the first sentence of a file's docstring, or as many of its clauses as fit."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    sentence = re.split(r"\.(?:\s|$)", text.replace("\n", " "), maxsplit=1)[0]
    for mark in ("; ", ": ", ", "):
        while len(sentence) > width and mark in sentence:
            sentence = sentence.rpartition(mark)[0]
    return sentence


def walk(block: str, folder: Path) -> str:
    """Run each `$` line of a block and put what it prints beneath it, notes before the result."""
    lines = []
    for line in block.splitlines():
        if line.startswith("$ "):
            ended = run(line[2:], folder)
            lines += [line, *(ended.stderr + ended.stdout).rstrip().splitlines(), ""]
    return "\n".join(["```console", *lines[:-1], "```"])


def run(line: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a line of the README in a folder, with this interpreter's kvmap."""
    program, _, rest = line.partition(" ")
    known = {"kvmap": f"{shlex.quote(sys.executable)} -m kvmap", "python": sys.executable}
    line = f"{known.get(program, program)} {rest}".replace("examples/", f"{ROOT}/examples/")
    environment = {**os.environ, "KVMAP_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    ended = subprocess.run(
        line, shell=True, cwd=folder, capture_output=True, text=True, env=environment
    )
    if ended.returncode not in (0, 3):  # 3 is a verdict, not a failure
        raise RuntimeError(f"{line}: {ended.stderr}")
    return ended


def results(folder: Path) -> str:
    """Fit and evaluate every pair with every recipe; lay the figures out as a table."""
    rows = [
        "| source → target | recipe | native | source | **mapped** | best control | retention "
        "| gap recovered | KL | verdict |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for source, target in PAIRS:
        for recipe in RECIPES:
            name = f"{source}-{target}-{recipe}.map"
            run(f"kvmap fit {source} {target} -o {name} --recipe {recipe} {FIT}", folder)
            made = run(f"kvmap eval {name} {EVAL} --json -q", folder).stdout
            rows.append(_result(source, target, recipe, json.loads(made)))
    today = datetime.date.today().isoformat()
    how = f"`kvmap fit SOURCE TARGET --recipe R {FIT}`, then `kvmap eval MAP {EVAL}`"
    where = f"{platform.machine()}, {os.cpu_count()} cores, fp32"
    text = f"{today}, {where}: {how}; 95 % intervals over documents."
    return "\n".join([textwrap.fill(text, 100, break_on_hyphens=False), "", *rows])


def _result(source: str, target: str, recipe: str, found: dict) -> str:
    arms, ends = found["arms"], found["intervals"]
    control = found["margin_control"]
    best = arms[control]["accuracy"] if control in arms else None
    cells = [
        f"{source} → {target}",
        recipe,
        *(_number(arms[arm]["accuracy"]) for arm in ("native", "source")),
        f"**{_number(arms['mapped']['accuracy'])}**",
        f"{_number(best)} ({control})",
        *(_spread(found[name], ends[name]) for name in ("retention", "gap_recovered")),
        _number(arms["mapped"]["kl"]),
        found["verdict"],
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _spread(value: float | None, ends: list[float] | None) -> str:
    return "–" if value is None else f"{value:.2f} [{ends[0]:.2f}, {ends[1]:.2f}]"


def section(text: str, name: str) -> str:
    """Return what stands between a section's markers."""
    return re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end -->", text, re.DOTALL)[1]


def put(text: str, name: str, content: str) -> str:
    """Replace what stands between a section's markers."""
    return text.replace(
        f"<!-- {name} -->\n{section(text, name)}\n<!-- end -->",
        f"<!-- {name} -->\n{content}\n<!-- end -->",
    )


def main() -> None:
    text = README.read_text()
    text = put(text, "commands", command_table())
    text = put(text, "tree", source_tree())
    with tempfile.TemporaryDirectory() as scratch:
        if "--walk" in sys.argv:
            text = put(text, "walk", walk(section(text, "walk"), Path(scratch)))
        if "--results" in sys.argv:
            text = put(text, "results", results(Path(scratch)))
    README.write_text(text)


if __name__ == "__main__":
    main()
