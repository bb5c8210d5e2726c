"""Let the harness run a task once per arm and gather its judgements into scores."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from kvmap.errors import UsageError
from kvmap.evaluate.harness.engine import Engine, Likelihood
from kvmap.evaluate.scores import Record, Scores, join

# The first of these that a task reports is its accuracy.
METRICS = ("acc_norm", "acc", "exact_match", "f1", "em")

Samples = dict[tuple[str, int], dict[str, Any]]


def judge(
    name: str,
    wanted: Sequence[str | dict[str, Any]],
    engine: Engine,
    limit: int | None,
    few_shot: int | None,
) -> Scores:
    """Return a task's scores over the engine's arms; a group's tasks become labels."""
    from kvmap.evaluate.harness.model import KvmapModel

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    models = {arm: KvmapModel(engine, arm) for arm in engine.arms}
    tasks = load(wanted)
    found = {arm: samples_of(model, tasks, limit, few_shot) for arm, model in models.items()}
    native = found["native"]
    keys = list(native)[: limit or None]
    if not keys:
        raise UsageError(f"task {name} has no items: the harness found 0 rows, expected at least 1")
    several = len({task for task, _ in keys}) > 1
    records = []
    for unit, key in enumerate(keys):
        labels = {"subtask": key[0]} if several else {}
        right = [_accuracy(found[arm][key]) for arm in engine.arms]
        records.append(_record(unit, labels, right, _gold(models["native"], native[key]), engine))
    return join(records, name, _chance(native.values()), engine.arms)


def load(wanted: Sequence[str | dict[str, Any]]) -> list[Any]:
    """Return the harness's task objects of names or configurations, data read."""
    return list(manager().load(list(wanted))["tasks"].values())


def samples_of(model: Any, tasks: list[Any], limit: int | None, few_shot: int | None) -> Samples:
    """Run one arm; return the samples by task and document, of the first filter."""
    from lm_eval import simple_evaluate

    result = simple_evaluate(
        model=model,
        tasks=tasks,
        task_manager=manager(),
        num_fewshot=few_shot,
        limit=None if limit is None else -(-limit // len(tasks)),
        bootstrap_iters=0,
        log_samples=True,
    )
    kept: Samples = {}
    for task, samples in result["samples"].items():
        for sample in samples:
            kept.setdefault((task, sample["doc_id"]), sample)
    return kept


@cache
def manager() -> Any:
    """Return the harness's index of tasks; making it reads thousands of files."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _accuracy(sample: dict[str, Any]) -> float:
    for metric in METRICS:
        if isinstance(sample.get(metric), int | float):
            return float(sample[metric])
    return math.nan


def _gold(model: Any, sample: dict[str, Any]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the requests that score the right answer: a choice, or a rolled text's halves."""
    arguments, target = sample["arguments"], sample["target"]
    if len(arguments[0]) == 1:
        return model.rolled.get(arguments[0][0], [])
    if not isinstance(target, int) or not 0 <= target < len(arguments):
        return []
    context, answer = arguments[target]
    if not isinstance(answer, str) or not context:
        return []
    return [tuple(map(tuple, model._encode_pair(context, answer)))]


def _record(
    unit: int, labels: dict[str, Any], right: list[float], gold: list, engine: Engine
) -> Record:
    """Make a document's record; what an arm has not answered is NaN."""
    columns = [[engine.likelihoods.get((arm, pairing)) for pairing in gold] for arm in engine.arms]
    tables = {name: _by_token(columns, name) for name in ("nll", "kl", "top1")}
    return Record(unit, [labels], [right], [len(tables["nll"])], **tables)


def _by_token(columns: list[list[Likelihood | None]], name: str) -> list[list[float]]:
    """Return one row per token, a column per arm."""
    lengths = [len(part.nll) for part in columns[0] if part]
    rows = []
    for column in columns:
        parts = [
            getattr(part, name) if part else [math.nan] * length
            for part, length in zip(column, lengths, strict=True)
        ]
        rows.append([value for part in parts for value in part])
    return [list(row) for row in zip(*rows, strict=True)]


def _chance(samples: Any) -> float | None:
    """Return the accuracy of guessing: one over the choices; 0 where an answer is generated."""
    shares = []
    for sample in samples:
        if math.isnan(_accuracy(sample)):
            return None
        choice = isinstance(sample["arguments"][0][-1], str)
        shares.append(1 / len(sample["arguments"]) if choice else 0.0)
    return sum(shares) / len(shares) if shares else None
