"""`kvmap select-layers`: which source layers each target layer reads."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvmap.cli import inputs, options
from kvmap.cli.output import Output, figure, heat

EXAMPLES = (
    "kvmap select-layers m-l.calib -k 4 -o m-l.layers",
    "kvmap select-layers m-l.calib -k auto --method greedy --json",
)


def run(
    calibration: Annotated[
        Path, typer.Argument(metavar="CALIB", help="A folder that `kvmap collect` made.")
    ],
    output: options.output("the choice", "LAYERS") = None,
    k: options.K = None,
    method: options.LayerMethod = None,
    recipe: options.Recipe = None,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Score all pairs of layers and choose."""
    from kvmap.artifacts import refuse_overwrite
    from kvmap.calibration import Calibration
    from kvmap.pipeline import cached_layers

    out = Output(as_json, quiet)
    if output is not None:
        refuse_overwrite(output, force)
    wanted = inputs.edited_recipe(recipe, {"k": inputs.count_or_auto("-k", k)}, {})
    method = inputs.one_of("--method", method, "top", "greedy") or "top"
    opened = Calibration.open(calibration)
    source = opened.source
    inputs.check_count(out, k, wanted, source.geometry, source.name)
    choice, path, reused = cached_layers(opened, wanted, method, output)
    document = {
        "layers": str(path),
        "k": choice.k,
        "chosen": [list(row) for row in choice.layers],
        "r2": r2_tables(choice.scores),
        "tried": choice.tried,
        "reused": ["select-layers"] if reused else [],
    }
    out.note(heat(choice.scores.mean("held_out").tolist(), choice.layers, out.colour))
    if choice.tried:
        tried = ", ".join(f"{count}: {figure(score)}" for count, score in choice.tried.items())
        out.note(f"held-out R² by k: {tried}")
    out.result(path, document)


def r2_tables(scores: Any) -> dict[str, dict[str, list[list[float]]]]:
    """Return R² [L_t, L_s] by split and kind, as JSON data."""
    return {
        split: {
            "key": getattr(scores, split)["key"].tolist(),
            "value": getattr(scores, split)["value"].tolist(),
            "mean": scores.mean(split).tolist(),
        }
        for split in ("train", "held_out")
    }
