"""Options that several commands share, spelt alike everywhere.

A default that the library sets is None here and stated in the help text; a test holds the two
together, so that help needs no import of torch.
"""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and no hints.")]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace what is already there.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Print the plan and its costs; do nothing.")
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1 or spread.")
]
Dtype = Annotated[
    str, typer.Option("--dtype", metavar="DTYPE", help="auto, float32, bfloat16 or float16.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Seed of all that is random.")]


def output(what: str, metavar: str, default: str) -> type:
    """Return the type of an `-o/--output` option; `default` says where it goes otherwise."""
    text = f"Where to write {what}. [default: {default}]"
    return Annotated[
        Path | None, typer.Option("--output", "-o", metavar=metavar, help=text, show_default=False)
    ]


def examples(*lines: str) -> str:
    """Lay out example commands for the end of a help text, each on its own line."""
    # "\b" alone on a line keeps the help formatter from folding what follows.
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))
