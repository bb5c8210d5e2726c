"""How what `kvmap bench` measured is laid out as text."""

from __future__ import annotations

from typing import Any

from kvmap.cli.output import amount, figure, table


def plan_text(rows: list[dict[str, Any]]) -> str:
    """Lay out what a bench would hold and take."""
    return table(
        ("source", "target", "recipe", "tokens", "caches", "map GFLOP", "seconds"),
        [
            (
                *_names(row),
                row["tokens"],
                amount(row["cache_bytes"]),
                round(row["map_flops"] / 1e9, 1),
                round(row["seconds"], 1),
            )
            for row in rows
        ],
    )


COLUMNS = {
    "tokens": "tokens",
    "source ms": "source_prefill_seconds",
    "map ms": "map_seconds",
    "build ms": "build_seconds",
    "first token ms": "first_token_seconds",
    "handoff ms": "handoff_seconds",
    "prefill ms": "target_prefill_seconds",
}


def report(document: dict[str, Any]) -> str:
    """Lay out medians, speed-ups and shares of the machine's peaks."""
    head = ("source", "target", "recipe", *COLUMNS, "warm", "cold", "matmul", "copy", "extra")
    rows = [_row(one) for one in document["contexts"]]
    lines = [table(head, rows), _machine_line(document["machine"])]
    if any((one["matmul_share"] or 0) > 1 for one in document["contexts"]):
        lines.append("shares above 100 %: other work slowed the machine while it was measured")
    if document["maps"]:
        loads = ", ".join(f"{one['load_seconds'] * 1e3:.0f}" for one in document["maps"])
        lines.append(f"map loaded from disk in {loads} ms")
    for one in document["contexts"]:
        if "prefill" in one:
            lines.append(
                f"{one['tokens']} tokens: prefill {one['prefill']}; map {one['mapped']}; its "
                f"products alone take {figure(100 * one['products_share'], 0)} % of its time"
            )
    return "\n".join([*lines, *_growth_lines(document)])


def part_text(document: dict[str, Any], part: str) -> str:
    """Lay out what one part took by itself."""
    lay_out = {"map": _map_table, "stream": _stream_table, "fit": _fit_table}[part]
    lines = [lay_out(document[part]), _machine_line(document["machine"])]
    return "\n".join([*lines, *_growth_lines(document)])


def _map_table(rows: list[dict[str, Any]]) -> str:
    titles = ("tokens", "map ms", "µs a token", "products", "matmul", "extra")
    return table(
        ("source", "target", "recipe", *titles),
        [
            (
                *_names(one),
                one["tokens"],
                round(one["map_seconds"] * 1e3, 1),
                round(one["map_seconds"] * 1e6 / one["tokens"], 1),
                _share(one["products_share"]),
                _share(one["matmul_share"]),
                amount(one["extra_bytes"]),
            )
            for one in rows
        ],
    )


def _stream_table(rows: list[dict[str, Any]]) -> str:
    parts = ("chunk", "last_chunk", "tail", "left", "whole")
    titles = ("a chunk ms", "last chunk ms", "tail ms", "left ms", "in one go ms")
    return table(
        ("source", "target", "recipe", "tokens", *titles, "last / chunk"),
        [
            (
                *_names(one),
                one["tokens"],
                *(round(one[f"{part}_seconds"] * 1e3, 1) for part in parts),
                round(one["last_over_chunk"], 2),
            )
            for one in rows
        ],
    )


def _fit_table(rows: list[dict[str, Any]]) -> str:
    titles = ("fit s", "accumulate ms a token", "two forward passes ms a token", "share")
    return table(
        ("source", "target", "recipe", "measured", *titles),
        [
            (
                *_names(one),
                one["measured"],
                round(one["fit_seconds"], 1),
                round(one["accumulate_seconds_per_token"] * 1e3, 2),
                round(one["forward_seconds_per_token"] * 1e3, 2),
                _share(one["accumulate_share"]),
            )
            for one in rows
        ],
    )


def _names(one: dict[str, Any]) -> tuple[Any, ...]:
    return one["source"], one["target"], one["recipe"]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{figure(100 * value, 0)} %"


def _machine_line(machine: dict[str, Any]) -> str:
    peaks = (machine["matmul_flops"] / 1e9, machine["copy_bytes"] / 1e9)
    return (
        f"{machine['name']}, {machine['threads']} threads, {machine['dtype']}, {machine['clock']}: "
        f"{peaks[0]:.1f} GFLOP/s, {peaks[1]:.1f} GB/s copied"
    )


def _growth_lines(document: dict[str, Any]) -> list[str]:
    return [
        f"{one['source']} → {one['target']}: from {one['tokens'][0]} to {one['tokens'][1]} tokens "
        f"the map's time grows as tokens^{one['map_exponent']:.2f}; "
        f"at most {amount(one['extra_bytes'])} beside the caches"
        for one in document.get("growth", ())
    ]


def _row(one: dict[str, Any]) -> list[Any]:
    cells: list[Any] = [one["source"], one["target"], one["recipe"], one["tokens"]]
    cells += [round(one[key] * 1e3, 1) for key in list(COLUMNS.values())[1:]]
    cells += [f"{one[key]:.1f}×" for key in ("warm_speedup", "cold_speedup")]
    cells += [_share(one[key]) for key in ("matmul_share", "copy_share")]
    return [*cells, amount(one["extra_bytes"])]
