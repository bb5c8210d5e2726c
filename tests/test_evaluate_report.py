"""From a map to a report: contract, files, gates, evidence, resumption, errors."""

import json
from dataclasses import replace

import measured
import pytest
from checkpoints import byte_tokenizer

from kvmap import artifacts, fit
from kvmap.cli import layout
from kvmap.cli import report as side_by_side
from kvmap.errors import FloorMissed, UsageError
from kvmap.evaluate import evaluation, evidence, gates, runner
from kvmap.evaluate.arms import make_pair
from kvmap.evaluate.evaluation import EvaluateOptions, evaluate
from kvmap.evaluate.page import page
from kvmap.evaluate.report import Report, build, report_files
from kvmap.models import Checkpoint
from kvmap.models.load import wrap
from kvmap.text import beginnings

ARMS = {
    "native",
    "source",
    "mapped",
    "raw_copy",
    "random_map",
    "wrong_document",
    "zero",
    "no_context",
}
OTHER = fit.describe(replace(fit.RECIPES["paper"], ridge=0.5))
SMALL = EvaluateOptions(tasks=("text", "demo"), limit=6, lengths=(64,), diagnosed=2)


@pytest.fixture(scope="module")
def found():
    return evaluate(*measured.twin(), SMALL)


def test_figures_keep_the_contract(found):
    figures = found.figures
    assert set(figures["arms"]) == ARMS
    for arm in figures["arms"].values():
        assert {"accuracy", "nll", "kl", "top1"} <= set(arm)
    assert {"retention", "gap_recovered", "n", "verdict"} <= set(figures)
    assert figures["n"] == 6
    assert figures["cosine"]["mean"] > 1 - 1e-5
    assert figures["cosine"]["worst"] > 1 - 1e-5
    assert set(figures["tasks"]) == {"text", "demo"}
    assert figures["arms"]["mapped"]["kl"] == pytest.approx(0, abs=1e-5)
    json.dumps(artifacts.without_nan(figures), allow_nan=False)


def test_report_survives_its_files(found, tmp_path):
    path = found.save(tmp_path / "a.report")
    loaded = Report.load(path)
    assert loaded.figures == json.loads(json.dumps(artifacts.without_nan(found.figures)))
    assert set(loaded.tensors) == set(found.tensors)
    assert loaded.labels["demo"] == found.labels["demo"]
    assert loaded.tensors["tasks.demo.accuracy.mapped"].shape == (6,)
    assert artifacts.read_json(report_files(path)[1], "report")["verdict"] == found.verdict


def test_equal_evaluations_give_equal_bytes(found, tmp_path):
    again = evaluate(*measured.twin(), SMALL)
    first, second = found.save(tmp_path / "a.report"), again.save(tmp_path / "b.report")
    assert first.read_bytes() == second.read_bytes()


def test_interrupted_evaluation_goes_on_and_ends_the_same(found, tmp_path, monkeypatch):
    journal, made = tmp_path / "journal.jsonl", []
    score = runner._score

    def failing(pair, task, unit, item, arms):
        made.append((task.name, unit))
        if len(made) == 4:
            raise KeyboardInterrupt
        return score(pair, task, unit, item, arms)

    monkeypatch.setattr(runner, "_score", failing)
    with pytest.raises(KeyboardInterrupt):
        evaluate(*measured.twin(), SMALL, journal)
    with journal.open("a") as file:
        file.write('{"task": "text", "rec')  # killed while writing
    resumed = evaluate(*measured.twin(), SMALL, journal)
    assert len(made) == len(set(made)) + 1  # the item it died in, and no other, is done twice
    assert resumed.figures == found.figures
    assert not journal.exists()


def _planted_report(cmap=None):
    """Report on questions about the twin, optionally with another map in its place."""
    right, source, target = measured.twin()
    task = measured.questions()
    pair = make_pair(right, source, target, task.items[0].context)
    pair = replace(pair, cmap=cmap(pair)) if cmap else pair
    scores = runner.run_task(pair, task)
    return build([scores], None, evaluation.about(pair.cmap, EvaluateOptions()))


def test_gates_pass_a_right_map_and_stop_a_content_free_one():
    right = _planted_report()
    gates.enforce(right.figures, gates.Gates(max_kl=0.01, min_margin=0.1, min_retention=0.9))
    with pytest.raises(FloorMissed, match="content-free: another document's cache") as stopped:
        gates.enforce(_planted_report(lambda pair: pair.zero).figures, gates.Gates())
    assert stopped.value.exit_code == 3


def test_gate_holds_the_end_of_the_interval_not_the_point():
    figures = {
        "verdict": "recovers",
        "documents": 50,
        "undefined": {},
        "retention": 0.91,
        "gap_recovered": None,
        "margin": 0.29,
        "intervals": {"retention": [0.85, 0.99], "gap_recovered": None, "margin": [0.2, 0.4]},
        "arms": {"mapped": {"kl": 0.21, "intervals": {"kl": [0.01, 0.3]}}},
        "cosine": {"mean": 0.95, "interval": [0.9, 0.97], "documents": 8},
    }
    check = lambda **floors: gates.check(figures, gates.Gates(**floors))  # noqa: E731
    assert check(min_retention=0.84, min_margin=0.1, min_cosine=0.9, max_kl=0.3) == []
    assert check(min_retention=0.92) == [
        "retention may be as low as 0.850, below --min-retention 0.92"
    ]
    assert check(max_kl=0.2) == ["kl may be as high as 0.300, above --max-kl 0.2"]
    assert check(min_retention=0.9) == [
        "retention is 0.910, but over 50 documents it may be as low as 0.850, "
        "below --min-retention 0.9"
    ]
    assert check(max_kl=0.25) == [
        "kl is 0.210, but over 50 documents it may be as high as 0.300, above --max-kl 0.25"
    ]
    assert "cosine is 0.950, but over 8 documents it may" in check(min_cosine=0.94)[0]
    assert "gap_recovered is undefined" in check(min_gap_recovered=0.1)[0]
    assert len(check(min_margin=0.3, min_cosine=0.94)) == 2


def test_over_few_documents_no_floor_is_reached_and_over_many_the_figure_decides():
    """A verdict may lack for a reason that is none of this floor's."""
    figures = _planted_report().figures | {"verdict": "not enough items", "unsure": "the source"}
    asked = gates.Gates(min_margin=0.0, min_gap_recovered=0.5, max_kl=0.1)
    gap, margin = gates.check(figures | {"documents": 9}, asked)
    few = "too few documents for intervals (9, at least 10)"
    assert margin == f"--min-margin 0 cannot be said to be met: {few}"
    assert "undefined (the source is as good as native or better" in gap
    assert gates.check(figures | {"documents": 10}, asked) == [gap]


def test_evidence_is_bound_to_the_map_and_its_verdict(found, tmp_path):
    path = tmp_path / "a.map"
    assert evidence.read(path) is None
    measured.twin()[0].save(path)
    with pytest.raises(UsageError, match=r"no evidence; run `kvmap eval --sign"):
        evidence.require(path)
    good = Report(found.figures | {"verdict": "recovers"})
    evidence.sign(path, good, found.save(tmp_path / "a.report"))
    assert evidence.require(path)["verdict"] == "recovers"
    evidence.sign(path, Report(found.figures | {"verdict": "content-free"}))
    with pytest.raises(UsageError, match="says 'content-free', expected 'recovers'"):
        evidence.require(path)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(UsageError, match="is evidence for another map"):
        evidence.read(path)


def _not_held_out(report):
    about = report.figures["about"] | {"read_in_calibration": {"my.jsonl": "content"}}
    return replace(report, figures=report.figures | {"about": about})


def test_text_that_is_not_held_out_is_said_beside_every_verdict(found):
    said = "on text the calibration has read: not held out"
    seen = _not_held_out(found)
    sure = replace(seen, figures=seen.figures | {"verdict": "recovers", "unsure": None})
    assert f"verdict: recovers, {said}\n" in f"{layout.render(sure.figures)}\n"
    assert f'"verdict">recovers, {said}<' in page(sure)
    assert f"at least 10; {said}\n" in layout.render(seen.figures)
    side = side_by_side.compare([("seen", sure.figures), ("not", found.figures)])
    (line,) = (line for line in side.splitlines() if line.startswith("verdict"))
    assert "recovers (not held out)" in line
    assert line.count("held out") == 1
    for text in (layout.render(found.figures), page(found)):
        assert said not in text


def test_what_is_not_held_out_is_not_signed(found, tmp_path):
    path = measured.twin()[0].save(tmp_path / "a.map")
    with pytest.raises(
        UsageError, match=r"a\.map: cannot be signed by .* my\.jsonl, .* other text"
    ):
        evidence.sign(path, _not_held_out(found))
    assert evidence.read(path) is None
    evidence.sign(path, found)
    assert evidence.read(path)["read_in_calibration"] == {}


def test_edited_evidence_is_refused(found, tmp_path):
    path = tmp_path / "a.map"
    measured.twin()[0].save(path)
    written = evidence.sign(path, Report(found.figures | {"verdict": "content-free"}))
    written.write_text(written.read_text().replace("content-free", "recovers"))
    with pytest.raises(UsageError, match="does not match its digest"):
        evidence.read(path)


def test_page_stands_alone(found):
    text = page(found)
    assert text.startswith("<!doctype html>")
    assert "http://" not in text.replace("http://www.w3.org", "").replace("http://purl.org", "")
    for arm in ARMS:
        assert arm in text
    assert found.verdict in text


def test_few_documents_are_said_at_the_head_and_have_no_p(found):
    head = "6 questions on 2 documents; too few documents for intervals (2, at least 10)"
    assert head in page(found)
    text = layout.render(found.figures)
    assert text.splitlines()[0] == f"source → target: {head}"
    (line,) = (line for line in text.splitlines() if line.startswith("mapped - native"))
    assert line.endswith("]  p -")
    enough = layout.render(_planted_report().figures).splitlines()[0]
    assert enough.endswith("36 questions on 12 documents; intervals 95 %, over documents")


def test_smallest_p_is_an_upper_bound_and_wilson_s_intervals_are_marked():
    report = _planted_report()
    text, html = layout.render(report.figures), page(report)
    (line,) = (line for line in text.splitlines() if line.startswith("mapped - wrong_document"))
    assert "  p < 0.001, McNemar p " in line
    assert layout.p_values({"p_bootstrap": 0.002}) == "p 0.002"
    arms = {line.split()[0]: line for line in layout.arms_table(report.figures).splitlines()}
    assert "1.000 [0.758, 1.000]* " in arms["native"]
    assert "*" not in arms["wrong_document"]
    assert arms["*"].startswith("* Wilson's score interval")
    assert "<td>1.000 [0.758, 1.000]*</td>" in html
    assert "<p>* Wilson" in html
    report.figures["arms"] = {"zero": report.figures["arms"]["zero"]}
    assert "Wilson" not in layout.arms_table(report.figures)


def test_reports_are_laid_out_alone_and_side_by_side(found):
    text = layout.render(found.figures)
    assert f"verdict: {found.verdict}" in text
    assert "wrong_document" in text
    assert "undefined: the source is as good as native or better" in text
    side = side_by_side.compare([("one", found.figures), ("two", found.figures)])
    lines = {line.split()[0]: line.split()[1:] for line in side.splitlines()}
    assert lines["one"] == ["two"]
    assert lines["k"] == ["1", "1"]
    about = found.figures["about"]
    paper, default = (fit.describe(fit.RECIPES[name]) for name in ("paper", "kvmap"))
    default["options"]["lookback_layers"] = [0, 1]  # as a fit fills them in
    for recipe, name in ((paper, "paper"), (default, "kvmap"), (OTHER, "other")):
        fitted = found.figures | {"about": about | {"provenance": {"recipe": recipe}}}
        said = side_by_side.compare([("a", fitted)])
        assert ["recipe", name] in [line.split() for line in said.splitlines()]
    assert "verdict: not enough items: 2 documents, of which a verdict needs at least 10" in text
    assert "mapped accuracy" in side


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ("dmeo",)}, "no task named 'dmeo'; did you mean demo"),
        ({"tasks": ("xyzzy",)}, "no task named 'xyzzy'"),
        ({"tasks": ("needle",), "lengths": (9000,)}, "9000 .* reads at most 8192; pass a small"),
        ({"tasks": ("demo",), "limit": 0}, "task demo has no items"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(options, message):
    asked = replace(EvaluateOptions(limit=5), **options)
    with pytest.raises(UsageError, match=message):
        evaluate(*measured.twin(), asked)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ({"dataset": "elsewhere.jsonl", "files": ["other", "this"]}, "content"),
        ({"dataset": "my.jsonl", "files": ["other"]}, None),
        ({"dataset": "owner/name", "files": []}, None),
        ({"dataset": "x/a.jsonl#text,my.jsonl#text"}, "name"),
        ({"dataset": "owner/name"}, None),
        ({"merged": [{"dataset": "a"}, {"dataset": "b", "files": ["this"]}]}, "content"),
        ({"dataset": 5, "files": {"my.jsonl": 1}}, None),
        (5, None),
    ],
    ids=str,
)
def test_text_that_the_calibration_has_read_is_not_held_out(text, same, tmp_path):
    """By how the file begins; by its name in maps that keep no more of their text."""
    path = tmp_path / "my.jsonl"
    path.write_text('{"text": "a"}\n')
    for other in ("a#my.jsonl", "wikitext-2-raw-v1/test.jsonl", "piqa/test.jsonl"):
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_bytes(path.read_bytes())
    (digest,) = beginnings([path]).values()
    text = json.loads(json.dumps(text).replace('"this"', f'"{digest}"'))
    right = measured.twin()[0]
    maps = [replace(right, provenance={"text": text})]
    maps += [replace(right, provenance={"composed": [{}, maps[0].provenance]})]
    back = {"alternate": maps[0].save(tmp_path / "back.map")}
    found = {} if same is None else {"my.jsonl": same}
    for cmap in maps:
        for read in (
            {"tasks": ("text",), "text": str(path)},
            {"tasks": ("chat",), "data": path},
            {"tasks": ("wikitext2",), "data": path},
        ):
            asked = EvaluateOptions(**read)
            assert evaluation.about(cmap, asked)["read_in_calibration"] == found
            unseen = replace(cmap, provenance={})
            assert evaluation.read_in_calibration(unseen, replace(asked, **back)) == found
        if same == "content":
            for name, data in (
                ("chat", "a#my.jsonl"),
                ("wikitext2", "wikitext-2-raw-v1/test.jsonl"),
                ("piqa", "piqa/test.jsonl"),
            ):
                folder = tmp_path / data if name == "chat" else tmp_path
                asked = EvaluateOptions(tasks=(name,), data=folder)
                assert evaluation.read_in_calibration(cmap, asked) == {
                    data.rpartition("/")[2]: "content"
                }
        unread = EvaluateOptions(tasks=("demo",), text=str(path), data=path)
        assert evaluation.read_in_calibration(cmap, unread) == {}
        assert evaluation.read_in_calibration(cmap, EvaluateOptions(tasks=("text",))) == {}


def test_other_models_and_other_tokenizers_are_refused():
    cmap, source, target = measured.twin()
    other = wrap(source.model, byte_tokenizer(reverse=True), Checkpoint("other", "planted"))
    with pytest.raises(UsageError, match="cannot be compared: the tokenizers differ"):
        evaluate(cmap, other, target)
    with pytest.raises(UsageError, match="the map's source is source"):
        evaluate(cmap, target, target)


def test_conversation_with_a_right_map_does_not_drift():
    options = EvaluateOptions(
        tasks=("demo_conversations",), limit=20, lengths=(64,), diagnosed=0, history="own"
    )
    figures = evaluate(*measured.twin(), options).figures
    task = figures["tasks"]["demo_conversations"]
    assert task["drift"]["mean"] == pytest.approx(0)
    assert task["drift"]["slope"] == pytest.approx(0)
    assert list(task["by"]["turn"]) == [str(turn) for turn in range(1, 11)]
    assert figures["arms"]["mapped"]["nll"] == pytest.approx(
        figures["arms"]["native"]["nll"], abs=1e-4
    )
    assert figures["arms"]["mapped"]["kl"] < 1e-4
