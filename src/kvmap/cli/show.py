"""`kvmap show`: what a file is, where it comes from, and what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from kvmap.cli import layout, options
from kvmap.cli.output import Output, amount, figure, heat, printable_data, table

EXAMPLES = ("kvmap show m-l.map", "kvmap show m-l.layers --json")

DIGEST = re.compile("[0-9a-f]{64}")  # told apart by its beginning; `--json` has all of it

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="Any artifact: a map, a report, a calibration, ...")
]


def run(file: File, as_json: options.Json = False) -> None:
    """Describe an artifact: kind, provenance, tensors, content."""
    from kvmap.header import peek, sound

    kind, out = peek(file), Output(as_json)
    with sound(file, kind):
        found = _calibration(file) if kind == "calibration" else _artifact(file)
        text = "\n\n".join(_parts(printable_data(found), out.stdout_colour))
        out.document(found, lambda: text)


def _artifact(path: Path) -> dict[str, Any]:
    from kvmap.artifacts import open_artifact, read_json

    if path.suffix == ".json":
        data = read_json(path)
        return {"file": str(path), "kind": data["kind"], "metadata": data, "tensors": {}}
    opened = open_artifact(path)
    tensors = {name: list(opened.shape(name)) for name in opened.names()}
    found = {
        "file": str(path),
        "kind": opened.kind,
        "sha256": opened.sha256,
        "bytes": path.stat().st_size,
        "metadata": opened.metadata,
        "tensors": tensors,
    }
    return found | _content(path, opened.kind)


def _content(path: Path, kind: str) -> dict[str, Any]:
    """Return what a kind of artifact says beyond its header."""
    if kind == "layers":
        from kvmap.layers import load_layers

        scores, layers, _ = load_layers(path)
        held_out = scores.mean("held_out").tolist()
        return {"chosen": [list(row) for row in layers], "held_out_r2": held_out}
    if kind == "report":
        from kvmap.evaluate.report import Report

        return {"figures": Report.load(path).figures}
    if kind == "map":
        from kvmap.evaluate import evidence

        return {"r2": _r2(path), "evidence": evidence.status(path)}
    return {}


def _calibration(path: Path) -> dict[str, Any]:
    from kvmap.calibration import Calibration

    opened = Calibration.open(path)
    files = {file.name: file.stat().st_size for file in sorted(path.iterdir()) if file.is_file()}
    return {
        "file": str(path),
        "kind": "calibration",
        "bytes": opened.bytes,
        "metadata": opened.index,
        "files": files,
    }


def _parts(found: dict[str, Any], colour: bool) -> list[str]:
    from kvmap.evaluate.evidence import evidence_path
    from kvmap.header import sound

    head = f"{found['file']}: {found['kind']}"
    if "bytes" in found:
        head += f", {amount(found['bytes'])}"
    parts = [head, provenance(found["metadata"])]
    if "chosen" in found:
        parts.append(heat(found["held_out_r2"], found["chosen"], colour))
    if "evidence" in found:
        with sound(evidence_path(Path(found["file"])), "report"):
            signed = evidence(found["evidence"])
        parts += [predicted(found["r2"]), signed]
    if "figures" in found:
        parts.append(layout.render(found["figures"]))
    elif found.get("tensors"):
        shapes = [(name, "×".join(map(str, shape))) for name, shape in found["tensors"].items()]
        parts.append(table(("tensor", "shape"), shapes))
    if "files" in found:
        files = [(name, amount(size)) for name, size in found["files"].items()]
        parts.append(table(("file", "size"), files))
    return [part for part in parts if part]


def _r2(path: Path) -> dict[str, Any]:
    """Return a map's R² by "split.kind": mean of what is mapped, worst head, and the table."""
    from kvmap.evaluate import shift
    from kvmap.mapping import CacheMap

    cmap = CacheMap.load(path)
    mapped = [index for index, layer in enumerate(cmap.layers) if layer]
    return {
        name: {
            "mean": table[mapped].mean().item(),
            "worst": shift.worst(table),
            "by_layer_and_head": table.tolist(),
        }
        for name, table in cmap.r2.items()
    }


def predicted(found: dict[str, Any]) -> str:
    """Say how well a map predicts rows it was not fitted on, and how far the sample flatters it."""
    said = []
    for kind in ("key", "value"):
        if f"held_out.{kind}" in found:
            own, sample = found[f"held_out.{kind}"], found[f"train.{kind}"]
            head = own["worst"]
            said.append(
                f"{kind}s {figure(own['mean'])}, worst {figure(head['r2'])} in head "
                f"{head['head']} of layer {head['layer']} (in sample {figure(sample['mean'])})"
            )
    return f"held-out R²: {'; '.join(said)}" if said else ""


def evidence(found: dict[str, Any]) -> str:
    """Lay out what an evaluation has signed for a map, or why there is nothing that counts."""
    if found["state"] != "valid":
        return f"evidence: {found['state']}; {found['reason']}"
    count = f"{found['n']} questions on {found['documents']} documents"
    lines = [f"evidence: {found['verdict']}; {count} ({', '.join(found['tasks'])}), intervals 95 %"]
    for name in ("retention", "gap_recovered", "margin"):
        label = f"margin over {found['margin_control']}" if name == "margin" else name
        why = found["undefined"].get(name)
        value = layout.spread(found[name], found["intervals"][name])
        lines.append(f"  {label.replace('_', ' ')} {f'undefined: {why}' if why else value}")
    lines += [f"  {line}" for line in filter(None, [layout.cosine(found["cosine"])])]
    sources = {"file": found["report_file_sha256"], "figures": found["figures_sha256"]}
    said = ", ".join(f"{name} sha256 {digest}" for name, digest in sources.items() if digest)
    return "\n".join([*lines, f"  report: {said}"])


def provenance(metadata: dict[str, Any]) -> str:
    """Lay out a header's fields: models by name and shape, groups of plain values on one line."""
    lines: list[tuple[str, str]] = []
    for key, value in metadata.items():
        _flatten(key, value, lines)
    width = max((len(key) for key, _ in lines), default=0)
    return "\n".join(f"{key:<{width}}  {value}" for key, value in lines)


def _flatten(key: str, value: Any, lines: list[tuple[str, str]]) -> None:
    if not isinstance(value, dict):
        lines.append((key, _plain(value)))
    elif "geometry" in value:
        lines.append((key, _model(value)))
    else:
        groups = {name: part for name, part in value.items() if isinstance(part, dict)}
        alone = [_named(name, part) for name, part in value.items() if name not in groups]
        if alone:
            lines.append((key, ", ".join(alone)))
        for name, part in groups.items():
            _flatten(f"{key}.{name}", part, lines)


def _named(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {_plain(value)}"


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        apart = "; " if any(isinstance(part, list) for part in value) else " "
        text = apart.join(map(_plain, value)) or "-"
        return text if len(text) <= 72 else f"{text[:64]}... ({len(value)})"
    if isinstance(value, str) and DIGEST.fullmatch(value):
        return value[:12]
    return "-" if value is None else str(value)


def _model(signature: dict[str, Any]) -> str:
    shape = signature["geometry"]
    return (
        f"{signature['name']} ({shape['model_type']}, {shape['layers']} layers, "
        f"{shape['kv_heads']} KV heads of {shape['head_size']}, {signature['dtype']}, "
        f"weights {signature['weights_digest'][:12]})"
    )
