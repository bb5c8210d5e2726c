"""`kvmap lowest`: what a map reads of its target, kept apart from the rest."""

from pathlib import Path
from typing import Annotated

import typer

from kvmap.cli import inputs, options
from kvmap.cli.output import Output, amount
from kvmap.errors import UsageError

EXAMPLES = (
    "kvmap lowest m-l.map -o m-l.lowest",
    "kvmap lowest m-l.map -o m-l.lowest --dtype bfloat16",
)


def run(
    cmap: options.Map,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="LOWEST", help="Where to write the layers.")
    ],
    target_model: options.TargetModel = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Keep a target's lowest layers: all of it that a map reads."""
    from kvmap.artifacts import refuse_overwrite
    from kvmap.collect_pair import Loading
    from kvmap.handoff import check_pair
    from kvmap.mapping import CacheMap
    from kvmap.models import save_lowest

    out = Output(as_json, quiet)
    inputs.refuse_inputs(output, cmap)
    refuse_overwrite(output, force)
    loaded = CacheMap.load(cmap)
    count = loaded.options.read_layers
    if not count:
        raise UsageError(
            f"{cmap}: reads none of its target's layers, so there is nothing to keep; "
            "`CacheMap.apply` maps without the target"
        )
    loading = inputs.given(Loading, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    target = loading.open(target_model or loaded.target.name)
    check_pair(loaded, None, target)
    save_lowest(target, count, output)
    size, whole = output.stat().st_size, target.model.get_memory_footprint()
    out.note(
        f"{count} of {loaded.target.geometry.layers} layers: {amount(size)} of {amount(whole)}"
    )
    made = {"lowest": str(output), "layers": count, "bytes": size, "model_bytes": whole}
    out.result(output, made)
