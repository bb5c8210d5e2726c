"""Refuse options that other options leave without effect, rather than ignore them.

Every function is given a command's options as typed, None or False where they were not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvmap.errors import UsageError

if TYPE_CHECKING:
    from kvmap.fit import Recipe

Asked = dict[str, Any]
# What `kvmap fit --frontier` and `--budget` try out themselves.
VARIED = (
    "-k",
    "--heads",
    "--assign",
    "--joint",
    "--anchor",
    "--lookback",
    "--lookback-layers",
    "--rank",
    "--layers",
)
# What follows the measurement of candidates, and is no part of it.
AFTER = ("--method", "--weights", "--width", "--polish", "--output")
# What `kvmap eval --predict` reads; all else that can be asked is of tasks.
PREDICTED = ("--length", "--text")
# Options that some tasks read and others do not, by their names in the library.
OF_TASKS = {
    "lengths": "--length",
    "text": "--text",
    "data": "--data",
    "turn": "--turn",
    "history": "--history",
    "alternate": "--alternate",
    "few_shot": "--few-shot",
}


def refuse(asked: Asked, names: Iterable[str], why: str) -> None:
    """Refuse the first of some options that was given.

    Raises:
        UsageError: With its name before `why`.
    """
    for name in names:
        if asked.get(name) is not None and asked[name] is not False:
            raise UsageError(f"{name} {why}")


def flag(value: bool | None, name: str) -> Asked:
    """Return `--name` or `--no-name`, whichever was typed."""
    return {} if value is None else {f"--{name}" if value else f"--no-{name}": True}


def in_fit(asked: Asked, recipe: Recipe) -> None:
    """Check the options of `kvmap fit` against each other and the recipe they make.

    Raises:
        UsageError: One would be ignored.
    """
    frontier, budget = asked["--frontier"], asked["--budget"] is not None
    if not frontier and not budget:
        refuse(asked, ["--plot"], "draws what --frontier or --budget measures; give one of them")
    else:
        _in_frontier(asked, frontier)
    if recipe.options.heads == "all":
        why = "pairs matched heads, and this map's read all; add --heads matched"
        refuse(asked, ["--assign"], why)
    if not recipe.options.lookback:
        why = "is of tokens before, and this map reads none; add --lookback"
        refuse(asked, ["--lookback-layers"], why)
    if recipe.method == "closed-form":
        why = "is of networks, and there are none; add --method mlp or residual"
        refuse(asked, ["--width"], why)
    else:
        why = "is of linear maps, and networks keep theirs whole; leave it out"
        refuse(asked, ["--rank"], why)
    if recipe.method == "mlp":
        why = "is of linear maps, and an mlp is none; take --method residual"
        refuse(asked, ["--weights"], why)
    if asked["--layers"] is not None:
        of_chosen(asked, recipe.method != "closed-form")
    if recipe.options.native_layers and asked.get("--no-exact-first"):
        raise UsageError(
            "--no-exact-first would map layer 0, which the lowest native layers hold; "
            "add --native-layers 0"
        )


def of_chosen(asked: Asked, networks: bool) -> None:
    """Check options of `kvmap fit` where the layers are chosen already.

    Raises:
        UsageError: One would be ignored.
    """
    chooses = ["-k"] if networks else ["-k", "--method"]
    refuse(asked, chooses, "chooses layers, and they are chosen already; leave it out")


def of_models(asked: Asked, recipe: Recipe) -> None:
    """Check options of `kvmap fit` that say how models are loaded, beside a calibration.

    Raises:
        UsageError: The recipe runs none: its fit is of moments and rows, on the CPU.
    """
    if recipe.weights == "none" and not recipe.polish:
        refuse(asked, asked, "is of models, and a fit of this calibration runs none; leave it out")


def _in_frontier(asked: Asked, frontier: bool) -> None:
    if frontier:
        refuse(asked, ["--budget"], "fits the best map and --frontier fits none; leave one out")
        refuse(asked, AFTER, "is of a map, and --frontier fits none; give a --budget instead")
    varied = [name for name in asked if name.replace("--no-", "--") in VARIED]
    refuse(asked, varied, "is what --frontier and --budget vary; leave it out")


def in_collect(asked: Asked, merge: bool, moments: bool) -> None:
    """Check the options of `kvmap collect` against each other.

    Raises:
        UsageError: One would be ignored.
    """
    if asked.get("--no-joint") and asked["--no-dump"]:
        why = "is of rows or joint moments, and neither is kept; leave it out"
        refuse(asked, ["--lookback-layers"], why)
    if merge:
        refuse(asked, asked, "is what merged calibrations have already; leave it out")
    if not moments:
        refuse(asked, ["--products"], "is of moments, and --no-moments keeps none; leave one out")


def in_eval(asked: Asked, tasks: tuple[str, ...], predict: bool) -> None:
    """Check the options of `kvmap eval` against each other and the tasks.

    Args:
        tasks: Names of kvmap's tasks and the harness's.

    Raises:
        UsageError: One would be ignored.
    """
    if predict:
        others = [name for name in asked if name not in PREDICTED]
        refuse(asked, others, "is of tasks, and --predict runs none; leave one out")
        return
    from kvmap.evaluate.tasks import is_read

    if asked["--messages"] is not None:
        refuse(asked, ["--data"], "is read by no task beside --messages; evaluate them apart")
    for name, option in OF_TASKS.items():
        if not is_read(name, tasks):
            refuse(asked, [option], f"is read by none of the tasks {', '.join(tasks)}")


def in_transfer(asked: Asked) -> None:
    """Check the options of `kvmap transfer` against each other.

    Raises:
        UsageError: One would be ignored.
    """
    lowest = asked["--lowest"] is not None
    if lowest:
        whole = ["--generate", "--target"]
        refuse(asked, whole, "is of the whole target, --lowest of a part; leave one out")
    if asked["--cache"] is not None and not asked["--compare"]:
        refuse(asked, ["--source"], "is not run where --cache is given")
        if lowest:
            why = "is of whole models, and beside --cache and --lowest none is run; leave it out"
            refuse(asked, ["--device spread", "--trust-remote-code"], why)


def in_bench(asked: Asked, published: bool) -> None:
    """Check the options of `kvmap bench` against each other.

    Args:
        published: Models are built from configs alone.

    Raises:
        UsageError: One would be ignored.
    """
    if published:
        why = "is of checkpoints, and --random-weights and --only fit read none; leave it out"
        refuse(asked, ["--trust-remote-code"], why)
    if asked["MAP"] is not None:
        names = ["--pair", "--both", "--recipe"]
        refuse(asked, names, "says which map to make, and MAP is made already; leave one out")
    if asked["--repeats"] is not None:
        refuse(asked, ["--budget"], "is time, and --repeats counts rounds instead; leave one out")
