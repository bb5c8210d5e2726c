"""lm-evaluation-harness as an engine: any of its tasks over all arms (extra `eval`).

The harness makes the requests and judges the answers; `engine` answers them from caches made
once per context, `model` is what the harness sees, one instance per arm. What is context:

multiple choice   the whole prompt, few-shot examples included, but for its last token; the
                  choices are scored by whoever reads
generation        the same; the answer is generated greedily
rolling           per window of the model's length, the first half; it is scored natively by
                  whoever reads, the second half given the arm's cache of the first
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvmap.errors import UsageError
from kvmap.evaluate.arms import ARMS, Pair
from kvmap.evaluate.scores import Scores

if TYPE_CHECKING:
    from kvmap.evaluate.evaluation import EvaluateOptions
    from kvmap.evaluate.journal import Journal
    from kvmap.evaluate.runner import Progress


@cache
def task_names() -> frozenset[str] | None:
    """Return the names of the harness's tasks, groups and tags; None where it is missing."""
    if find_spec("lm_eval") is None:
        return None
    from kvmap.evaluate.harness.judge import manager

    return frozenset(manager().all_tasks)


def run(
    name: str, pair: Pair, options: EvaluateOptions, journal: Journal, progress: Progress
) -> Scores:
    """Return a harness task's scores over all arms; contexts in the journal are not run again.

    Raises:
        UsageError: Its data cannot be had, or a model cannot read its contexts.
    """
    from kvmap.evaluate.harness.engine import Engine, Kept
    from kvmap.evaluate.harness.judge import judge
    from kvmap.evaluate.harness.local import specifications

    kept = Kept(journal, name)
    engine = Engine(pair, tuple(ARMS), lambda done, total: progress(name, done, total), kept)
    wanted = specifications(name, options.data)
    try:
        return judge(name, wanted, engine, options.limit, options.few_shot)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise UsageError(
            f"task {name}: the harness cannot run it ({reason}); pass local rows with `--data`"
        ) from error
