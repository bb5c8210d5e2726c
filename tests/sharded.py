"""Collect with models that processes share, as `torchrun` starts them: refused, stopped, resumed.

Arguments: a folder to write in, text, two models that can be shared, then names of others. Every
process writes a line of exit codes; what it says of errors goes to standard error.
"""

import sys
from contextlib import nullcontext
from unittest import mock

from kvmap.cli.app import main
from kvmap.collect import _Run
from kvmap.ranks import ranks


def code(*arguments: str) -> int:
    """Return the exit code of a command line."""
    try:
        main(list(arguments))
    except SystemExit as stop:
        return stop.code
    raise AssertionError("main exits")


def stop_at_second(run: _Run, shard: int, add=_Run.add_moments) -> None:
    """Add the first shard's rows, then be stopped by Ctrl-C."""
    if shard == 1:
        raise KeyboardInterrupt
    add(run, shard)


folder, text, source, target, *others = sys.argv[1:]
rest = ("--dataset", text, "--sequences", "48", "--length", "24", "-q")
rest += ("--device", "tensor-parallel")
# torch joins processes once in their lives, and here several command lines share them.
with (
    ranks(sharded=True) as team,
    mock.patch("kvmap.collect_pair.ranks", return_value=nullcontext(team)),
):
    codes = [code("collect", source, name, "-o", f"{folder}-none", *rest) for name in others]
    with mock.patch.object(_Run, "add_moments", stop_at_second):
        codes.append(code("collect", source, target, "-o", folder, *rest))
    codes.append(code("collect", source, target, "-o", folder, *rest))
sys.stdout.write(f"codes {codes}\n")
