"""How a report is laid out as text: arms, ratios, verdict, and each task by its groups."""

from typing import Any

from kvmap.cli.output import figure, table

RATIOS = {
    "retention": "retention",
    "floor_normalised_retention": "floor-normalised",
    "gap_recovered": "gap recovered",
    "gap_recovered_nll": "gap recovered (nats)",
}


def spread(value: float | None, ends: list[float] | None, digits: int = 3) -> str:
    """Write a figure with its interval."""
    if value is None or ends is None:
        return figure(value, digits)
    return f"{figure(value, digits)} [{figure(ends[0], digits)}, {figure(ends[1], digits)}]"


def render(figures: dict[str, Any]) -> str:
    """Lay a report out as text: arms, ratios, verdict, then each task by its groups."""
    from kvmap.evaluate.report import conclusion, extent

    about = figures["about"]
    head = f"{about['source']} → {about['target']}: {extent(figures)}"
    parts = [head, arms_table(figures), ratios(figures), tasks_table(figures)]
    parts += [diagnostics(figures)]
    parts += [
        f"verdict: {conclusion(figures)}",
        *(f"{name} by {label}\n{groups(table_)}" for name, label, table_ in _grouped(figures)),
        *(grid(name, task["grid"]) for name, task in figures["tasks"].items() if task["grid"]),
        *(drift(name, task) for name, task in figures["tasks"].items() if task.get("drift")),
    ]
    return "\n\n".join(part for part in parts if part)


def arms_table(figures: dict[str, Any]) -> str:
    """Lay out the arms, a row each."""
    from kvmap.evaluate.statistics import WILSON_NOTE, by_wilson

    rows, note = [], ""
    for arm, found in figures["arms"].items():
        right = spread(found["accuracy"], found["intervals"]["accuracy"])
        if by_wilson(found["accuracy"]):
            right, note = f"{right}*", f"\n* {WILSON_NOTE}"
        rest = [figure(found.get(name)) for name in ("nll", "kl", "kl_p95", "top1")]
        rows.append([arm, right, *rest])
    return table(("arm", "accuracy", "nll", "kl", "kl p95", "top1"), rows) + note


def ratios(figures: dict[str, Any]) -> str:
    """Lay out retention, gap and margin with intervals, tests beside them.

    Differences are of the score: of accuracy, or of nats, in which more is fewer of them.
    """
    unit = "" if figures["score"] == "accuracy" else " nats better"
    lines = []
    for name, label in RATIOS.items():
        why = figures["undefined"].get(name)
        value = spread(figures[name], figures["intervals"][name])
        lines.append((label, f"undefined: {why}" if figures[name] is None and why else value))
    label = f"margin over {figures['margin_control']}"
    lines.append((label, spread(figures["margin"], figures["intervals"]["margin"])))
    for name, found in figures["tests"].items():
        label = f"mapped - {name.removeprefix('mapped_')}"
        value = spread(found["difference"], found["interval"])
        lines.append((label, f"{value}{unit}  {p_values(found)}"))
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in lines)


def p_values(found: dict[str, Any]) -> str:
    """Write a difference's p-values; the smallest that resamples allow is an upper bound."""
    from kvmap.evaluate.statistics import SMALLEST_P

    p, exact = found["p_bootstrap"], found.get("p_mcnemar")
    said = "p -" if p is None else f"p {p:.2g}"
    if p is not None and p <= SMALLEST_P:
        said = f"p < {SMALLEST_P:.1g}"
    return said if exact is None else f"{said}, McNemar p {exact:.2g}"


def tasks_table(figures: dict[str, Any]) -> str:
    """Lay out the tasks, a row each, where there are several."""
    rows = []
    for name, task in figures["tasks"].items():
        score = task["score"]
        arms = [task["arms"][arm][score] for arm in ("native", "source", "mapped")]
        gap = spread(task["gap_recovered"], task["intervals"]["gap_recovered"], 2)
        rows.append([name, score, task["n"], *arms, gap, task["verdict"]])
    head = ("task", "score", "n", "native", "source", "mapped", "gap recovered", "verdict")
    return table(head, rows) if len(rows) > 1 else ""


def diagnostics(figures: dict[str, Any]) -> str:
    """Say where the mapped cache is wrong, and on which text."""
    if figures["diagnostics"] is None:
        return ""
    lines = [cosine(figures["cosine"])]
    where = {"train": "in sample", "held_out": "held out", "evaluation": "on these documents"}
    means = figures["diagnostics"]["r2"]["mean"]
    for kind in ("key", "value"):
        said = [
            f"{figure(means[name][kind])} {label}" for name, label in where.items() if name in means
        ]
        lines.append(f"R² of {kind}s {', '.join(said)}{fall(figures, kind)}")
    return "\n".join(lines)


def fall(figures: dict[str, Any], kind: str) -> str:
    """Say which head loses most from held-out text to the evaluation's, where one does."""
    found = figures["diagnostics"]["r2"]["fall"][kind]
    if found is None:
        return ""
    ends = f"{figure(found['held_out'])} held out, {figure(found['evaluation'])} here"
    return f"; falls most in head {found['head']} of layer {found['layer']} ({ends})"


def cosine(found: dict[str, Any]) -> str:
    """Say how far attention outputs are off, and where most."""
    if found["mean"] is None:
        return ""
    head = found["worst_head"]
    return (
        f"attention-output cosine {spread(found['mean'], found['interval'])} on "
        f"{found['documents']} documents; worst layer {found['worst_layer']} "
        f"({figure(found['worst'])}), worst head {head['head']} of layer {head['layer']} "
        f"({figure(head['cosine'])})"
    )


def _grouped(figures: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (name, label, found)
        for name, task in figures["tasks"].items()
        for label, found in task["by"].items()
    ]


def groups(found: dict[str, Any]) -> str:
    """Lay out one grouping of a task's questions."""
    arms = list(next(iter(found.values()))["arms"])
    rows = [
        [
            value,
            group["n"],
            *(figure(next(iter(group["arms"][arm].values()))) for arm in arms),
            spread(group["gap_recovered"], group["intervals"]["gap_recovered"], 2),
        ]
        for value, group in found.items()
    ]
    return table(("", "n", *arms, "gap recovered"), rows)


def grid(name: str, found: dict[str, Any]) -> str:
    """Lay out accuracy by depth, down, and length, across: mapped, and native in brackets."""
    rows = []
    for depth, mapped, native in zip(
        found["depths"], found["mapped"], found["native"], strict=True
    ):
        cells = [
            f"{figure(own, 2)} ({figure(best, 2)})"
            for own, best in zip(mapped, native, strict=True)
        ]
        rows.append([f"{depth:.0%}", *cells])
    head = ("depth", *(f"{length} tokens" for length in found["lengths"]))
    return f"{name}: mapped (native) by depth and length\n{table(head, rows)}"


def drift(name: str, task: dict[str, Any]) -> str:
    """Say how native and mapped grow apart over a conversation's turns."""
    found = task["drift"]
    lines = [f"{name} drift, native - mapped: {_drift(found)}"]
    if "alternate" in found:
        lines.append(f"{name} drift, back and forth: {_drift(found['alternate'])}")
    return "\n".join(lines)


def _drift(found: dict[str, Any]) -> str:
    ends = found["intervals"]
    return (
        f"{spread(found['mean'], ends['mean'])}, by turn {spread(found['slope'], ends['slope'], 4)}"
    )


def prediction(found: dict[str, Any]) -> str:
    """Say what a map is likely to retain, and on how much that rests."""
    lines = [
        f"attention-output cosine {figure(found['cosine'])}, KL {figure(found['kl'])} nats per "
        f"token, on {found['documents']} documents"
    ]
    if found["retention"] is None:
        lines.append(f"no prediction: {found['maps']} maps were evaluated here, too few")
    else:
        lines.append(
            f"predicted retention {figure(found['retention'])}, off by {figure(found['error'])} "
            f"on the {found['maps']} maps evaluated here"
        )
    if found["read_in_calibration"]:
        lines.append("on text the calibration has read: not held out")
    return "\n".join(lines)
