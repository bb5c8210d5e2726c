"""lm-evaluation-harness over a planted twin: every arm that should be native equals its `hf`."""

import json

import measured
import pytest

pytest.importorskip("lm_eval", reason="needs the extra `eval`")

from kvmap.errors import UsageError
from kvmap.evaluate import arms
from kvmap.evaluate.evaluation import EvaluateOptions, evaluate
from kvmap.evaluate.harness import engine as engines
from kvmap.evaluate.harness import judge, local, task_names

# The harness and what it imports warn about themselves.
pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = ("red", "box", "lamp", "tree", "stone", "river", "cloud", "door", "glass", "paper")


def _phrase(start, count):
    return " ".join(WORDS[(start * 3 + i * i) % len(WORDS)] for i in range(count))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows invented here, in the columns of two hub data sets."""
    data = tmp_path_factory.mktemp("rows")
    made = {
        "piqa/validation": [
            {
                "goal": _phrase(i, 6),
                "sol1": _phrase(i + 1, 3),
                "sol2": _phrase(i + 4, 4),
                "label": i % 2,
            }
            for i in range(6)
        ],
        "gsm8k/test": [{"question": _phrase(i, 5), "answer": f"#### {i}"} for i in range(2)],
        "pages/test": [{"page": f" {_phrase(i, 12)} \n {_phrase(i + 2, 9)}"} for i in range(2)],
    }
    for name, found in made.items():
        path = data / f"{name}.jsonl"
        path.parent.mkdir()
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return data


@pytest.fixture(scope="module")
def reference():
    """The harness's own model class over the twin's target."""
    from lm_eval.models.huggingface import HFLM

    target = measured.twin()[2]
    return HFLM(pretrained=target.model, tokenizer=target.tokenizer, batch_size=1)


@pytest.fixture
def models():
    from kvmap.evaluate.harness.model import KvmapModel

    cmap, source, target = measured.twin()
    pair = arms.make_pair(cmap, source, target, measured.contexts(1, 24)[0])
    engine = engines.Engine(pair, ("native", "mapped", "zero"), lambda done, total: None)
    return {arm: KvmapModel(engine, arm) for arm in engine.arms}


PAGES = {"task": "wikitext", "dataset_path": "json", "dataset_name": None}
PAGES |= {"training_split": None, "validation_split": None, "test_split": "test"}


def _wanted(name, data):
    if name == "wikitext":
        files = {"test": str(data / "pages" / "test.jsonl")}
        return [{"group": "pages", "task": [PAGES | {"dataset_kwargs": {"data_files": files}}]}]
    return local.specifications(name, data)


@pytest.mark.parametrize("name", ["piqa", "gsm8k", "wikitext"])
def test_native_and_rightly_mapped_answers_are_the_harness_own(name, rows, reference, models):
    """Choices by likelihood, greedy text, and rolled likelihood, item by item."""
    tasks = judge.load(_wanted(name, rows))
    own = judge.samples_of(reference, tasks, None, 0)
    for arm, model in models.items():
        found = judge.samples_of(model, tasks, None, 0)
        assert list(found) == list(own)
        same = [_same(own[key], found[key]) for key in own]
        assert all(same) == (arm != "zero")


def _same(one, other):
    for first, second in zip(one["resps"], other["resps"], strict=True):
        first, second = first[0], second[0]
        if isinstance(first, str):
            if first != second:
                return False
            continue
        first, second = (x[0] if isinstance(x, tuple | list) else x for x in (first, second))
        if float(first) != pytest.approx(float(second), abs=2e-3):
            return False
    return True


def test_a_harness_task_becomes_a_report(rows):
    options = EvaluateOptions(tasks=("piqa",), data=rows, limit=4, diagnosed=0, lengths=(64,))
    figures = evaluate(*measured.twin(), options).figures
    assert figures["n"] == 4
    assert figures["chance"] == 0.5
    assert figures["arms"]["mapped"]["accuracy"] == figures["arms"]["native"]["accuracy"]
    assert figures["arms"]["mapped"]["kl"] == pytest.approx(0, abs=1e-5)
    assert figures["arms"]["zero"]["kl"] > 0.01


def test_an_interrupted_harness_task_goes_on_and_ends_the_same(rows, tmp_path, monkeypatch):
    options = EvaluateOptions(tasks=("piqa",), data=rows, diagnosed=0, lengths=(64,))
    whole = evaluate(*measured.twin(), options).figures
    journal, ran, ask = tmp_path / "journal.jsonl", [], engines.Engine._ask

    def failing(engine, item, wrong):
        ran.append(item.context)
        if len(ran) == 4:
            raise KeyboardInterrupt
        return ask(engine, item, wrong)

    monkeypatch.setattr(engines.Engine, "_ask", failing)
    with pytest.raises(KeyboardInterrupt):
        evaluate(*measured.twin(), options, journal)
    resumed = evaluate(*measured.twin(), options, journal).figures
    assert len(ran) == len(set(ran)) + 1  # the context it died in, and no other, is run twice
    assert resumed == whole
    assert not journal.exists()


def test_a_harness_task_of_no_rows_says_so(monkeypatch):
    monkeypatch.setattr(judge, "load", lambda wanted: [])
    monkeypatch.setattr(judge, "samples_of", lambda *_: {})
    cmap, source, target = measured.twin()
    pair = arms.make_pair(cmap, source, target, measured.contexts(1, 24)[0])
    engine = engines.Engine(pair, ("native", "mapped"), lambda *_: None)
    with pytest.raises(UsageError, match="task piqa has no items: the harness found 0 rows, exp"):
        judge.judge("piqa", ["piqa"], engine, 4, None)


def test_harness_tasks_are_known_by_name():
    assert {"arc_challenge", "hellaswag", "winogrande", "mmlu", "gsm8k"} <= task_names()
