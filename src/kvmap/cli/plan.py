"""`kvmap plan`: can two models be paired, and what would it cost."""

from typing import Any

from kvmap.cli import inputs, options
from kvmap.cli.output import Output, amount, figure, large, table
from kvmap.errors import UsageError

EXAMPLES = (
    "kvmap plan qwen3-14b qwen3-32b",
    "kvmap plan tiny-m tiny-l --sequences 100 --length 512 --json",
)


def run(
    source: options.Source,
    target: options.Target,
    sequences: options.Sequences = None,
    length: options.Length = None,
    stride: options.Stride = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
) -> None:
    """Say whether two models can be paired, and what it costs.

    Of `kvmap fit SOURCE TARGET` by the default recipe; `kvmap fit -n` plans others.
    """
    from kvmap import fit
    from kvmap.collect_options import CollectOptions
    from kvmap.collect_pair import Loading, TextOptions
    from kvmap.fit_pair import FitRequest
    from kvmap.survey import survey

    found = survey(
        (source, target),
        inputs.given(TextOptions, sequences=sequences, length=length),
        inputs.given(CollectOptions, stride=stride),
        inputs.given(Loading, device=device, dtype=dtype, trust_remote_code=trust_remote_code),
        FitRequest(fit.recipe(fit.DEFAULT_RECIPE)),
    )
    Output(as_json).document(found, lambda: text(found))
    refuse_unpairable(found)


def refuse_unpairable(found: dict[str, Any]) -> None:
    """Refuse two models that a survey has found to be no pair.

    Raises:
        UsageError: Saying why.
    """
    if found["pairable"] is False:
        source, target = (found[side]["name"] for side in ("source", "target"))
        raise UsageError(f"{source} and {target} cannot be paired: {'; '.join(found['problems'])}")


def text(found: dict[str, Any]) -> str:
    """Lay out a survey for people."""
    states = {
        True: "can be paired",
        False: "cannot be paired",
        None: "may be paired if their tokenizers agree, which are not at hand here",
    }
    names = [found[side]["name"] for side in ("source", "target")]
    parts = [
        f"{names[0]} and {names[1]} {states[found['pairable']]}",
        table(
            ("", "type", "parameters", "layers", "KV heads", "head size", "cache per token"),
            [_model_row(side, found[side]) for side in ("source", "target")],
        ),
        maps_text(found["maps"]),
    ]
    if found["pairable"] is False:
        return "\n\n".join(parts[:2])
    passes = [found[name] for name in ("first_pass", "second_pass") if name in found]
    said = [found["two_passes"]] if passes else []
    parts += [*said, *map(collect_text, passes or [found["collect"]])]
    parts += [fit_text(found["fit"]), here_text(found["here"])]
    return "\n\n".join(parts)


def maps_text(maps: list[dict[str, Any]]) -> str:
    """Lay out the size of each recipe's map."""
    rows = [
        (
            m["recipe"],
            m["k"],
            amount(m["bytes"]),
            large(m["flops_per_token"]),
            figure(m["work_share"], 2),
            None if m["fit_bytes"] is None else amount(m["fit_bytes"]),
            amount(m["use_bytes"]),
        )
        for m in maps
    ]
    head = ("recipe", "k", "map", "FLOP per token", "over target's", "memory to fit", "to map")
    return table(head, rows)


def collect_text(cost: dict[str, Any]) -> str:
    """Lay out what a collection would take."""
    scope = f"moments of {cost['heads']} heads, {'' if cost['joint'] else 'not '}joint"
    disk = f"dump {amount(cost['dump_bytes'])}, moments {amount(cost['moments_bytes'])}"
    read = f"{cost['sequences']} sequences of {cost['length']} tokens"
    memory = f"{amount(cost['peak_bytes'])} at most"
    if "k" in cost:
        scope += f", of {cost['k']} source layers for each target layer"
        memory = (
            f"{amount(cost['peak_bytes'])} where layers of the same depth are chosen, "
            f"{amount(cost['apart_peak_bytes'])} at most"
        )
    lines = [
        f"collect {read}, one token in {cost['stride']} kept, {scope}:",
        f"  disk    {amount(cost['disk_bytes'])} ({disk})",
        f"  memory  {memory}",
        f"  work    {large(cost['flops'])}FLOP, about {duration(cost['seconds'])} here",
    ]
    return "\n".join([*lines, *([cost["too_large"]] if cost["too_large"] else [])])


def fit_text(cost: dict[str, Any]) -> str:
    """Lay out what the stages of a fit would take; a dash where models' configs are not at hand."""
    rows = [
        (
            row["stage"],
            None if row["peak_bytes"] is None else amount(row["peak_bytes"]),
            None if row["flops"] is None else f"{large(row['flops'])}FLOP",
            None if row["seconds"] is None else duration(row["seconds"]),
        )
        for row in cost["stages"]
    ]
    most = "" if cost["k_is_known"] else " at most"
    return table((f"fit, k = {cost['k']}{most}", "memory at most", "work", "time here"), rows)


def frontier_text(cost: dict[str, Any]) -> str:
    """Lay out what measuring candidates would take; dashes where a config is not at hand."""
    tails = " and ".join(map(str, cost["tails"]))
    memory, work = "-", "-"
    if cost["seconds"] is not None:
        memory = f"{amount(cost['peak_bytes'])} at most"
        work = f"{large(cost['flops'])}FLOP, about {duration(cost['seconds'])} here"
    lines = [
        f"measure {cost['candidates']} candidates of {cost['fits']} fits, native tail {tails}:",
        f"  memory  {memory}",
        f"  work    {work}",
    ]
    return "\n".join(lines)


def here_text(found: dict[str, Any]) -> str:
    """Say in one line whether this machine can do it all, and for how long it would work."""
    time = f"about {duration(found['seconds'])} at its present speed"
    if found["fits"]:
        memory = f"peak {amount(found['peak_bytes'])} of {amount(found['free_memory_bytes'])}"
        disk = f"disk {amount(found['disk_bytes'])} of {amount(found['free_disk_bytes'])} free"
        return f"here: fits ({memory}, {disk}), {time}"
    surely = found["fits"] is False
    lacks = "; ".join(_lack(lack, "" if surely else "up to ") for lack in found["lacking"])
    return f"here: does not fit: {lacks}" if surely else f"here: may not fit: {lacks}; {time}"


def _lack(lack: dict[str, Any], most: str) -> str:
    """Say what work needs of memory or disk, and what is there."""
    needed, free = amount(lack["bytes"]), amount(lack["free_bytes"])
    return f"{lack['work']} needs {most}{needed} of {lack['of']}, {free} are free"


def duration(seconds: float) -> str:
    """Write seconds in the unit that suits."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _model_row(side: str, model: dict[str, Any]) -> tuple[Any, ...]:
    return (
        side,
        model["model_type"],
        large(model["parameters"]),
        model["layers"],
        model["kv_heads"],
        model["head_size"],
        amount(model["kv_bytes_per_token"]),
    )
