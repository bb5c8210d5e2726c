"""An interrupted evaluation goes on item by item, its own tasks and the harness's alike."""

import json
from dataclasses import replace

import measured
import pytest

from kvmap.errors import UsageError
from kvmap.evaluate import runner
from kvmap.evaluate.arms import make_pair
from kvmap.evaluate.harness import engine as engines
from kvmap.evaluate.journal import Journal


@pytest.fixture(scope="module")
def pair():
    cmap, source, target = measured.twin()
    return make_pair(cmap, source, target, measured.contexts(1, 24)[0])


def test_journal_of_another_evaluation_is_not_used(tmp_path):
    path = tmp_path / "journal.jsonl"
    Journal.open(path, "one").put("task", "item", {"unit": 0})
    assert Journal.open(path, "one").get("task", "item") == {"unit": 0}
    assert Journal.open(path, "other").found == {}
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("line", ["5", "[]", "{}", '{"task": [1], "item": "b", "kept": {}}'])
def test_damaged_lines_of_a_journal_are_left_out(line, tmp_path):
    path = tmp_path / "journal.jsonl"
    Journal.open(path, "one").put("task", "item", {"unit": 0})
    with path.open("a") as file:
        file.write(f"{line}\n")
    assert Journal.open(path, "one").found == {("task", "item"): {"unit": 0}}
    path.write_text(f"{line}\n")
    assert Journal.open(path, "one").found == {}


def test_what_an_item_says_is_part_of_its_name(pair, tmp_path, monkeypatch):
    """Other rows under the same number are not taken for those that were finished."""
    task = measured.questions(documents=3, each=1)
    journal = Journal.open(tmp_path / "journal.jsonl", "one")
    runner.run_task(pair, task, journal)
    ran = _counted(monkeypatch, runner, "_score")
    runner.run_task(pair, replace(task, items=(task.items[1], *task.items[1:])), journal)
    assert len(ran) == 1


def _counted(monkeypatch, where, name, stop=None):
    """Count the calls of a function; interrupt the one of number `stop`."""
    made, usual = [], getattr(where, name)

    def counting(*arguments):
        made.append(arguments)
        if len(made) == stop:
            raise KeyboardInterrupt
        return usual(*arguments)

    monkeypatch.setattr(where, name, counting)
    return made


PAIRINGS = [(context, (5, 6)) for context in measured.contexts(5, 12)]
WISHES = [engines.Wish(context, (".",), 3) for context in measured.contexts(5, 9)]


def test_requests_longer_than_either_model_reads_are_refused(pair):
    engine = engines.Engine(pair, ("native",), lambda done, total: None)
    said = r"the task needs 900\d positions, but .* reads at most 8192; pass a smaller --few-shot"
    with pytest.raises(UsageError, match=said):
        engine.score([((1,) * 9000, (2,))])
    with pytest.raises(UsageError, match=said):
        engine.speak([engines.Wish((1,), (), 9000)])


@pytest.mark.parametrize(
    ("work", "asked", "kept"),
    [("_ask", PAIRINGS, "likelihoods"), ("_say", WISHES, "texts")],
)
def test_requests_that_were_answered_are_not_run_again(
    pair, tmp_path, monkeypatch, work, asked, kept
):
    path, arms = tmp_path / "journal.jsonl", ("native", "mapped", "zero")
    fill = "score" if work == "_ask" else "speak"

    def engine():
        own = engines.Kept(Journal.open(path, "one"), "task")
        return engines.Engine(pair, arms, lambda done, total: None, own)

    whole = engines.Engine(pair, arms, lambda done, total: None)
    getattr(whole, fill)(asked)
    with monkeypatch.context() as patch:
        _counted(patch, engines.Engine, work, stop=4)
        with pytest.raises(KeyboardInterrupt):
            getattr(engine(), fill)(asked)
    assert len(path.read_text().splitlines()) == 4  # the head, and the three that were answered
    with path.open("a") as file:
        file.write(json.dumps({"task": "task"})[:-4])  # killed while writing
    ran = _counted(monkeypatch, engines.Engine, work)
    resumed = engine()
    getattr(resumed, fill)(asked)
    assert len(ran) == 2
    assert getattr(resumed, kept) == getattr(whole, kept)
