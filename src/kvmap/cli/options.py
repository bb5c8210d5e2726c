"""Options that several commands share, spelt alike everywhere.

A default that the library sets is None here and stated in the help text; a test holds the two
together, so that help needs no import of torch.
"""

from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

MOST = 10**9  # of what is counted: more is a slip of the finger


def number(text: str) -> float:
    """Read a finite number: NaN is below no floor and would let everything pass."""
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and no hints.")]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace what is already there.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Print the plan and its costs; do nothing.")
]
_DEVICES = "cpu, cuda, cuda:1, spread{}, or auto. [default: auto]"
Device = Annotated[str | None, typer.Option("--device", metavar="DEVICE", help=_DEVICES.format(""))]
SharedDevice = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="DEVICE", help=_DEVICES.format(", tensor-parallel (under torchrun)")
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="DTYPE", help="float32, bfloat16, float16, or auto. [default: auto]"
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the code that a checkpoint brings along.")
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", metavar="N", min=0, max=2**63 - 1, help="Seed of all that is random. [default: 0]"
    ),
]

NAME = "A known name (`kvmap models`), a hub id, id@revision, or a local folder."
Source = Annotated[str, typer.Argument(metavar="SOURCE", help=f"Model that has read. {NAME}")]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="Model that shall go on; likewise.")]
Map = Annotated[Path, typer.Argument(metavar="MAP", help="A map that `kvmap fit` made.")]

SourceModel = Annotated[
    str | None,
    typer.Option("--source", metavar="MODEL", help="Where the map's source lies, if it moved."),
]
TargetModel = Annotated[
    str | None,
    typer.Option("--target", metavar="MODEL", help="Where the map's target lies, if it moved."),
]

# What calibration reads; None takes the library's default.
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        metavar="NAMES",
        help="Text, several joined by commas: demo, fineweb-edu, a hub id, id:config, a .jsonl, "
        ".parquet or .txt file or a folder; #column names a column. "
        "[default: demo for the embedded models, else fineweb-edu]",
    ),
]
Sequences = Annotated[
    int | None,
    typer.Option(
        "--sequences", metavar="N", min=1, max=MOST, help="Sequences to read. [default: 500]"
    ),
]
Length = Annotated[
    int | None,
    typer.Option(
        "--length", metavar="TOKENS", min=1, max=MOST, help="Tokens of each. [default: 1024]"
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(
        "--stride", metavar="N", min=1, max=MOST, help="Keep every Nth token. [default: 4]"
    ),
]
HeldOut = Annotated[
    float | None,
    typer.Option(
        "--held-out",
        metavar="SHARE",
        parser=number,
        help="Share of sequences never fitted on. [default: 0.1]",
    ),
]

# What a fit makes; None takes the recipe's own.
Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="NAME",
        help="Preset: kvmap, kvmap-fast, kvmap-matched, kvmap-native, kvmap-max, paper, "
        "cachebridge. [default: kvmap]",
    ),
]
K = Annotated[
    str | None,
    typer.Option(
        "-k", metavar="N|auto", help="Source layers per target layer; auto by held-out R²."
    ),
]
LookbackLayers = Annotated[
    str | None,
    typer.Option(
        "--lookback-layers",
        metavar="N,N",
        help="Source layers of the tokens before. [default: the first and the middle]",
    ),
]
LayerMethod = Annotated[
    str | None,
    typer.Option("--method", metavar="top|greedy", help="How to choose layers. [default: top]"),
]


def output(what: str, metavar: str, otherwise: str = "the cache folder") -> type:
    """Return the type of an `-o/--output` option; `otherwise` is where it goes if not given."""
    text = f"Where to write {what}. [default: {otherwise}]"
    return Annotated[Path | None, typer.Option("--output", "-o", metavar=metavar, help=text)]


def examples(*lines: str) -> str:
    """Lay out example commands for the end of a help text, each on its own line."""
    # "\b" alone on a line keeps the help formatter from folding what follows.
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))
