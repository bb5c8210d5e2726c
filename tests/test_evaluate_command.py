"""`kvmap eval` and `kvmap report` from the command line: output, files, exit codes."""

import json

import measured
import pytest

from kvmap import artifacts
from kvmap.cli.app import main
from kvmap.evaluate import evidence
from kvmap.geometry import json_digest


@pytest.fixture(scope="module")
def files(planted_paths, tmp_path_factory):
    """A saved twin with the right map, and with one that says nothing."""
    import torch

    from kvmap.mapping import CacheMap
    from kvmap.models import load

    source, target = (load(str(path), device="cpu") for path in planted_paths("twin_llama"))
    cmap = measured.twin()[0]
    right = CacheMap(source.signature, target.signature, cmap.layers, cmap.options)
    folder = tmp_path_factory.mktemp("maps")
    right.save(folder / "right.map")
    right.each(lambda _, part: part.each(torch.zeros_like)).save(folder / "zero.map")
    places = ["--source", str(planted_paths("twin_llama")[0])]
    places += ["--target", str(planted_paths("twin_llama")[1])]
    return folder, places


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVMAP_CACHE", str(tmp_path / "cache"))


def _run(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return (stopped.value.code, *capsys.readouterr())


SMALL = ("--tasks", "text", "--length", "64", "--limit", "12", "--diagnosed", "1")


def test_eval_writes_prints_and_signs(files, tmp_path, capsys):
    folder, places = files
    report, html = tmp_path / "a.report", tmp_path / "a.html"
    wanted = ("-o", report, "--html", html, "--sign", "--json", "--min-cosine", "0.9")
    code, out, _ = _run(capsys, "eval", folder / "right.map", *SMALL, *places, *wanted)
    assert code == 0
    figures = json.loads(out)
    assert figures["arms"]["mapped"]["nll"] == pytest.approx(figures["arms"]["native"]["nll"])
    assert figures["report"] == str(report)
    assert (folder / "right.map.evidence.json").exists()
    assert html.read_text().startswith("<!doctype html>")
    code, out, err = _run(capsys, "eval", folder / "right.map", *SMALL, *places, "-o", report)
    assert code == 2
    assert "exists already" in err
    code, out, _ = _run(capsys, "report", report, report)
    assert code == 0
    assert "native nll" in out


def test_transfer_asks_for_evidence(files, capsys):
    """Without any it warns, and refuses where evidence is required; a twin's never `recovers`."""
    folder, places = files
    asked = ("--prompt", "a story of some words", "--generate", "1", *places)
    code, _, err = _run(capsys, "transfer", folder / "zero.map", *asked)
    assert code == 0
    assert "no evidence for this map yet; `kvmap eval --sign" in err
    code, _, err = _run(capsys, "transfer", folder / "zero.map", *asked, "--require-evidence")
    assert code == 2
    assert "no evidence; run `kvmap eval --sign" in err
    code, _, err = _run(capsys, "transfer", folder / "right.map", *asked, "--require-evidence")
    assert code == 2
    assert "its evidence says" in err
    code, _, err = _run(capsys, "transfer", folder / "right.map", *asked)
    assert code == 0
    assert "this map's evidence says" in err


def test_show_says_what_is_signed_and_when_it_no_longer_holds(files, tmp_path, capsys):
    folder, places = files
    mine = tmp_path / "mine.map"
    mine.write_bytes((folder / "right.map").read_bytes())
    assert "evidence: none; no evidence for this map yet" in _run(capsys, "show", mine)[1]
    report = tmp_path / "a.report"
    signed = _run(capsys, "eval", mine, *SMALL, *places, "-o", report, "--sign", "--json")
    figures = json.loads(signed[1])
    code, out, _ = _run(capsys, "show", mine)
    assert code == 0
    assert f"evidence: {figures['verdict']}; 12 questions on 12 documents (text)" in out
    assert f"report: file sha256 {evidence.digest(report)}, figures sha256 " in out
    shown = json.loads(_run(capsys, "show", mine, "--json")[1])["evidence"]
    assert shown["state"] == "valid"
    assert shown["margin"] == figures["margin"]
    figures = artifacts.read_json(tmp_path / "a.json")
    del figures["kind"]
    assert shown["figures_sha256"] == json_digest(figures)
    mine.write_bytes((folder / "zero.map").read_bytes())
    stale = "evidence: stale; " + str(tmp_path / "mine.map.evidence.json: is evidence for another")
    assert stale in _run(capsys, "show", mine)[1]
    assert json.loads(_run(capsys, "show", mine, "--json")[1])["evidence"]["state"] == "stale"
    asked = ("--prompt", "a story of some words", "--generate", "1", *places)
    assert "is evidence for another map" in _run(capsys, "transfer", mine, *asked)[2]
    code, _, err = _run(capsys, "transfer", mine, *asked, "--require-evidence")
    assert code == 2
    assert "is evidence for another map" in err


def test_eval_on_the_calibration_s_own_text_says_so(files, tmp_path, capsys):
    """Where the text becomes a calibration, a map and a report, each by its own command."""
    places = files[1]
    text, cmap = tmp_path / "my.jsonl", tmp_path / "my.map"
    rows = [" ".join(f"w{i * j % 11}" for j in range(1, 40)) for i in range(1, 40)]
    text.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    asked = ("--dataset", text, "--sequences", "12", "--length", "32", "--recipe", "paper")
    code, _, err = _run(capsys, "fit", places[1], places[3], *asked, "-k", "1", "-o", cmap)
    assert code == 0, err
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(text.read_bytes())
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": row[::-1]}) + "\n" for row in rows))
    said = "copy.jsonl: the map's calibration has read a file of the same content, so what is"
    for path, seen in ((copy, {"copy.jsonl": "content"}), (other, {})):
        how = ("--length", "64", "--text", path, "--json")
        small = (*SMALL, *how, "--limit", "3", "-o", tmp_path / "a.report", "-f")
        for more in (small, (*how, "--predict")):
            code, out, err = _run(capsys, "eval", cmap, *more)
            found = json.loads(out)
            assert code == 0
            assert found.get("about", found)["read_in_calibration"] == seen
            assert (said in err) == bool(seen)
    figures = artifacts.read_json(tmp_path / "a.json")
    assert figures["about"]["read_in_calibration"] == {}
    how = ("--length", "64", "--text", copy)
    beside = "on text the calibration has read: not held out"
    for more in (("--tasks", "text", "--limit", "3", "--diagnosed", "0"), ("--predict",)):
        code, out, _ = _run(capsys, "eval", cmap, *more, *how)
        assert code == 0
        assert beside in out
    absent = ("--source", tmp_path / "absent")  # no model is looked for either
    code, out, err = _run(capsys, "eval", cmap, "--tasks", "text", *how, "--sign", *absent)
    assert (code, out) == (2, "")
    assert f"{cmap}: cannot be signed by what is measured on copy.jsonl, since its cal" in err
    assert not evidence.evidence_path(cmap).exists()


def test_missed_floor_exits_with_3_after_printing(files, capsys):
    folder, places = files
    floor = ("--max-kl", "0.01")
    code, out, err = _run(capsys, "eval", folder / "zero.map", *SMALL, *places, *floor)
    assert code == 3
    assert "verdict: " in out
    assert "wrong_document" in out
    assert "above --max-kl 0.01" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tasks", "dmeo"), "did you mean demo"),
        (("--tasks", ","), "expected names joined by commas"),
        (("--length", "3"), "expected numbers from 4"),
        (("--history", "none"), "expected own or gold"),
        (("--length", "99999999"), "--length needs 99999999 positions, but"),
        (("--tasks", "text", "--length", "99999999"), "; pass a smaller one"),
        (("-o", "r.report", "--html", "r.json"), "is where the report goes"),
        (("--tasks", "coqa", "--data", "."), "holds no folder coqa"),
    ],
)
def test_wrong_usage_is_one_sentence_and_2(files, capsys, options, message):
    folder, places = files
    code, out, err = _run(capsys, "eval", folder / "right.map", *places, *options)
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("how", [("--tasks", "text"), ("--tasks", "demo,text"), ("--predict",)])
def test_text_of_short_documents_alone_is_told_before_any_work(files, tmp_path, capsys, how):
    folder, places = files
    (tmp_path / "short.txt").write_text("too short.\n\nthis too.\n")
    text = ("--text", tmp_path / "short.txt", "--length", "64")
    code, out, err = _run(capsys, "eval", folder / "right.map", *places, *how, *text)
    assert (code, out) == (2, "")
    found = f"the longest document of {tmp_path / 'short.txt'} has "
    assert f"task text has no items: {found}" in err
    assert "expected at least 64; pass other text with --text, or, where" in err


def test_predict_runs_no_task(files, capsys):
    folder, places = files
    arguments = ("--predict", "--length", "64", "--json")
    code, out, _ = _run(capsys, "eval", folder / "right.map", *places, *arguments)
    assert code == 0
    assert json.loads(out)["cosine"] > 0.999
    assert json.loads(out)["maps"] == 0


def test_what_cannot_be_signed_is_told_before_any_work(files, tmp_path, capsys):
    mine = tmp_path / "mine.map"
    mine.write_bytes((files[0] / "right.map").read_bytes())
    evidence = tmp_path / "mine.map.evidence.json"
    nowhere = ("--source", "/absent", "--target", "/absent")  # which opening them would say
    code, out, error = _run(capsys, "eval", mine, *nowhere, "-o", evidence, "--sign", "--force")
    assert (code, out) == (2, "")
    assert "is what is read" in error
    evidence.mkdir()
    code, out, error = _run(capsys, "eval", mine, *nowhere, "--sign")
    assert (code, out) == (2, "")
    assert "so the map cannot be signed" in error


def test_text_that_a_tokenizer_does_not_know_is_told_or_refused(tmp_path, capsys):
    from kvmap.demo.tokens import word_ids

    known = list(word_ids())[10:20]
    mapped = tmp_path / "a.map"
    asked = ("--no-anchor", "--sequences", 20, "--length", 64, "--recipe", "cachebridge", "-k", 1)
    assert _run(capsys, "fit", "tiny-s", "tiny-s", *asked, "-o", mapped)[0] == 0
    for strange, code, said in ((6, 0, "25% of the text's"), (40, 2, "100% of the text's")):
        text = tmp_path / f"{strange}.txt"
        text.write_text(" ".join(["Kubernetes"] * strange + known * 5))
        how = ("--tasks", "text", "--text", text, "--length", 50, "--diagnosed", 0)
        ended, _, error = _run(capsys, "eval", mapped, *how, "--json")
        assert (ended, said in error) == (code, True), error
