"""The shape of the code: imports flow one way, and the command starts without heavy ones."""

import ast
import builtins
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvmap

PACKAGE = Path(kvmap.__file__).parent
# What a module imports stands in a line above its own, or in its own package.
ORDER = (
    ("errors", "demo", "metrics", "ridge", "affine"),
    ("geometry", "atomic", "header", "rows", "names"),
    ("artifacts", "columns", "rope"),
    ("cache", "moments", "text", "map_options", "chosen"),
    ("models", "calibration_files", "layers", "ranks"),
    ("calibration", "collect_options", "content"),
    ("clearing",),
    ("engine", "map_checks"),
    ("mapping", "collect"),
    ("handoff", "merge"),
    ("fit",),
    ("footprint", "transfer", "streaming", "pipeline", "evaluate"),
    ("plan",),
    ("fit_stages", "collect_pair"),
    ("fit_pair",),
    ("plan_fit",),
    ("plan_frontier", "survey", "bench"),
    ("cli",),
    ("__main__",),
)
PLACE = {name: row for row, names in enumerate(ORDER) for name in names}
MODULES = sorted(p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py"))


def part(path):
    """Return the first name below kvmap: a module, or the package it lies in."""
    return path.parts[0].removesuffix(".py")


def imported(path):
    """Yield the parts of kvmap that a file imports when it runs, inside functions too."""
    tree = ast.parse((PACKAGE / path).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            inner = [alias.name for alias in node.names] if node.module == "kvmap" else [""]
            names += [f"{node.module}.{name}" for name in inner]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("kvmap.")} - {""}


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_flow_one_way(path):
    own = part(path)
    if own == "__init__":
        return
    assert own in PLACE, f"{own} has no place in ORDER"
    for name in imported(path) - {own, "__version__"}:
        assert PLACE[name] < PLACE[own], f"{own} imports {name}"


def test_modules_have_names_of_their_own():
    taken = {"utils", "util", "helpers", "common", *dir(builtins)}
    names = {path.stem for path in MODULES} - {"__init__", "__main__"}
    assert not names & taken


def test_each_outside_world_has_its_doors():
    doors = {
        "safetensors": {"artifacts.py"},
        "datasets": {"rows.py"},
        "transformers": {"models", "bench", "demo"},
        "rich": {"cli/output.py"},
    }
    for path in MODULES:
        tree = ast.parse((PACKAGE / path).read_text())
        nodes = list(ast.walk(tree))
        modules = {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
        modules |= {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        for outside in {module.split(".")[0] for module in modules} & set(doors):
            assert {str(path), path.parts[0]} & doors[outside], f"{path} imports {outside}"


def run(*arguments, code):
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    return subprocess.run(
        [sys.executable, *arguments, code], capture_output=True, text=True, env=environment
    )


def loaded_after(code):
    """Return the modules that a fresh interpreter holds after some code."""
    ended = run("-c", code=f"{code}\nimport sys; print(' '.join(sys.modules))")
    assert ended.returncode == 0, ended.stderr
    return set(ended.stdout.split())


def test_importing_kvmap_does_nothing_but_know_its_names():
    assert not loaded_after("import kvmap; dir(kvmap)") & {"torch", "transformers", "typer"}


def test_help_needs_neither_torch_nor_rich():
    heavy = {"torch", "transformers", "datasets", "numpy", "rich", "safetensors", "pyarrow"}
    assert not loaded_after("import kvmap.cli.app") & heavy


@pytest.mark.parametrize("arguments", ["models", "show absent"])
def test_what_needs_no_model_is_said_without_torch(arguments):
    code = f"import kvmap.cli.app as a\ntry: a.main({arguments.split()!r})\nexcept SystemExit: pass"
    assert "torch" not in loaded_after(code)


def test_exported_names_exist():
    for name in kvmap.__all__:
        assert getattr(kvmap, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'CachesMap'"):
        kvmap.CachesMap  # noqa: B018
