"""Text becomes sequences that start where documents start; what cannot be read says so."""

import json
from itertools import islice
from pathlib import Path

import checkpoints
import datasets
import pytest
import torch
import transformers

from kvmap.demo.tokens import save_tokenizer
from kvmap.errors import UsageError
from kvmap.text import (
    beginnings,
    documents,
    local_sources,
    token_sequences,
    unknown_remark,
)

ROWS = Path(__file__).parents[2] / "shared" / "data" / "benchmarks"
needs_rows = pytest.mark.skipif(not ROWS.is_dir(), reason="no shared benchmark rows here")


@pytest.fixture(scope="module")
def tokenizer():
    return checkpoints.byte_tokenizer()


@pytest.fixture
def word_tokenizer(tmp_path):
    save_tokenizer(tmp_path)
    return transformers.AutoTokenizer.from_pretrained(tmp_path)


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_local_files_give_their_documents_in_order(tmp_path):
    jsonl = lines(tmp_path / "a.jsonl", {"id": 1, "text": " one "}, {"text": ""}, {"text": "two"})
    parquet = str(tmp_path / "b.parquet")
    datasets.Dataset.from_dict({"content": ["three", "four"]}).to_parquet(parquet)
    (tmp_path / "c.txt").write_text("five\nand more\n\n\nsix\n")
    expected = ["one", "two", "three", "four", "five\nand more", "six"]
    assert list(documents(jsonl)) == expected[:2]
    assert list(documents(parquet)) == expected[2:4]
    assert list(documents(str(tmp_path / "c.txt"))) == expected[4:]
    assert list(documents(str(tmp_path))) == expected


def test_a_folder_keeps_splits_apart_where_its_files_name_them(tmp_path):
    lines(tmp_path / "train.jsonl", {"text": "fit"})
    lines(tmp_path / "test-0.jsonl", {"text": "judge"})
    assert list(documents(str(tmp_path), split="train")) == ["fit"]
    assert list(documents(str(tmp_path), split="test")) == ["judge"]
    assert list(documents(str(tmp_path), split="other")) == ["judge", "fit"]


def test_files_are_known_again_by_how_they_begin(tmp_path):
    """Wherever they lie; hub data sets and the demo have none, and nothing begins like nothing."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "train-empty.jsonl").write_text("")
    first = lines(tmp_path / "train.jsonl", {"text": "fit"})
    again = lines(tmp_path / "sub" / "x.jsonl", {"text": "fit"})
    other = lines(tmp_path / "test.jsonl", {"text": "judge"})
    found = beginnings(map(Path, (first, again, other, tmp_path / "train-empty.jsonl")))
    assert found[first] == found[again] != found[other]
    assert set(found) == {first, again, other}
    asked = f"{first}#text, demo,owner/name:config,{other}"
    assert local_sources(asked, "train") == [Path(first), Path(other)]
    assert local_sources(str(tmp_path), "test") == [Path(other)]


def test_files_are_told_of_when_they_are_reached(tmp_path):
    for name in "abc":
        lines(tmp_path / f"{name}.jsonl", {"text": name}, {"text": name})
    reached = []
    texts = documents(str(tmp_path), reached=reached.append)
    assert (next(texts), reached) == ("a", [tmp_path / "a.jsonl"])
    assert [next(texts) for _ in range(2)] == ["a", "b"]
    assert reached == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]


def test_several_sources_take_turns_until_all_are_spent(tmp_path):
    first = lines(tmp_path / "a.jsonl", *({"text": f"a{i}"} for i in range(3)))
    second = lines(tmp_path / "b.jsonl", {"text": "b0"})
    assert list(documents(f"{first},{second}")) == ["a0", "b0", "a1", "a2"]


def test_a_path_with_a_comma_is_one_source(tmp_path):
    assert list(documents(lines(tmp_path / "a,b.jsonl", {"text": "one"}))) == ["one"]


def test_conversations_are_laid_out_by_the_chat_template(tmp_path, tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    expected = "<|turn|>user: hi</s><|turn|>assistant: ho</s>"
    other = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    path = lines(
        tmp_path / "a.jsonl",
        {"messages": messages},
        {"conversations": other},
        {"question": "hi", "answer": "ho"},
        {"question": "hi", "answer": 2},
    )
    made = list(documents(path, tokenizer=tokenizer))
    assert made[:3] == [expected] * 3
    assert made[3] == "<|turn|>user: hi</s>"
    assert next(documents(path)) == "hi\nho"


def test_a_column_can_be_named(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"text": "one", "goal": "two"})
    assert list(documents(f"{path}#goal")) == ["two"]
    with pytest.raises(UsageError, match=r"line 1: no column 'gaol'; found text, goal$"):
        next(documents(f"{path}#gaol"))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", '{"text": "secret"}\n{"text": "sec', "line 2 is no JSON object; mend"),
        ("a.jsonl", '["secret"]\n', "line 1 is no JSON object"),
        ("a.jsonl", "", "holds no text"),
        ("a.jsonl", '{"text": "  "}\n', "holds no text"),
        ("a.jsonl", '{"body": "secret"}\n', "no column to read; found body, expected one of text"),
        ("a.jsonl", '{"text": 3}\n', "no column to read; found text"),
        ("a.jsonl", '{"messages": ["secret"]}\n', "a turn of the conversation lacks role"),
        ("a.parquet", "secret", "is no sound parquet file"),
        ("a.csv", "secret", r"expected a \.jsonl, \.parquet, \.arrow, \.txt file"),
        ("a.txt", "", "holds no text"),
    ],
)
def test_unreadable_sources_are_refused_without_repeating_text(tmp_path, name, content, problem):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UsageError, match=problem) as caught:
        list(documents(str(path)))
    assert str(caught.value).startswith(str(path))
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_refused(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty").mkdir()
    for source, problem in [
        (tmp_path / "absent.jsonl", "no such file"),
        (tmp_path / "latin.txt", "is not UTF-8 text; convert it"),
        (tmp_path / "empty", r"no \.jsonl, \.parquet, \.arrow, \.txt file in this folder"),
        ("./absent", "no such file"),
        ("", "no data set named"),
    ]:
        with pytest.raises(UsageError, match=problem):
            list(documents(str(source)))


def test_a_hub_data_set_that_cannot_be_reached_is_one_sentence():
    with pytest.raises(UsageError, match="neither a local file nor a readable hub") as caught:
        list(documents("nobody/nothing:config"))
    assert "\n" not in str(caught.value)


def test_hub_names_are_streamed_with_their_config(monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return iter([{"text": "one"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(documents("fineweb-edu", split="train")) == ["one"]
    assert list(documents("owner/name:part", split="test")) == ["one"]
    assert asked == [
        (("HuggingFaceFW/fineweb-edu", "sample-10BT"), {"split": "train", "streaming": True}),
        (("owner/name", "part"), {"split": "test", "streaming": True}),
    ]


def test_the_demo_world_has_text_without_end():
    made = list(islice(documents("demo", tokens=64), 3))
    assert all(len(text.split()) >= 64 for text in made)
    assert made != list(islice(documents("demo", tokens=64, seed=1), 3))


def test_sequences_start_at_documents_and_join_short_ones(tokenizer):
    texts = ["a" * 7, "bb", "cc", "d", "ee", "f" * 9]
    ids = token_sequences(iter(texts), tokenizer, length=6, count=3)
    assert ids.shape == (3, 6)
    assert ids.dtype == torch.long
    assert tokenizer.batch_decode(ids) == ["aaaaaa", "bb\n\ncc", "d\n\nee\n"]


def test_the_first_special_token_stands_once_at_the_start(tokenizer):
    class Begins:
        bos_token = "<s>"

        def __call__(self, text, add_special_tokens, verbose):
            ids = tokenizer(text)["input_ids"]
            return {"input_ids": [1, *ids] if add_special_tokens else ids}

    ids = token_sequences(iter(["a", "b", "<s>cccc"]), Begins(), length=5, count=2)
    assert tokenizer.batch_decode(ids) == ["<s>a\n\nb", "<s>cccc"]


def test_too_little_text_is_refused_with_what_would_fit(tokenizer):
    with pytest.raises(UsageError, match=r"gives 1 sequences, expected 3 .* `--sequences 1`"):
        token_sequences(iter(["aaaa", "b"]), tokenizer, length=4, count=3)
    with pytest.raises(UsageError, match=r"gives 2 tokens, expected 3 .* smaller `--length`"):
        token_sequences(iter(["aa"]), tokenizer, length=4, count=3)


@needs_rows
@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("calib_open_edu", 350),
        ("coqa/validation_ccbysa.jsonl", 100),
        ("gsm8k", 250),
        ("mmlu/test.jsonl", 228),
        ("arc_easy", 250),
        ("hellaswag/validation.jsonl#ctx", 250),
        ("winogrande_xl#sentence", None),
        ("piqa/validation.jsonl#goal", 250),
    ],
)
def test_public_benchmark_rows_can_be_read(tokenizer, source, count):
    where, _, column = source.partition("#")
    path = f"{ROWS / where}{'#' + column if column else ''}"
    texts = list(documents(path, tokenizer=tokenizer))
    assert len(texts) == count or count is None
    assert token_sequences(iter(texts), tokenizer, 256, 8).shape == (8, 256)


@needs_rows
def test_mixed_sources_give_sequences_of_each(tokenizer):
    texts = documents(f"{ROWS / 'wikitext-2-raw-v1'},{ROWS / 'gsm8k'},demo", tokenizer=tokenizer)
    assert token_sequences(texts, tokenizer, 64, 12).shape == (12, 64)


def test_text_that_a_tokenizer_does_not_know_is_remarked_on_and_then_refused(word_tokenizer):
    """A calibration on `<unk>` alone would be fitted without a word."""
    known = word_tokenizer.convert_ids_to_tokens(range(10, 20))

    def ids(strange):
        text = " ".join(["Kubernetes"] * strange + known * 9)
        return token_sequences([text], word_tokenizer, 50, 1)

    assert unknown_remark(ids(2), word_tokenizer) is None
    assert unknown_remark(ids(10), word_tokenizer).startswith("20% of the text's tokens are unk")
    with pytest.raises(UsageError, match=r"60% of the text's .* <unk>; give other text"):
        ids(30)


def test_tokenizers_that_call_the_end_of_a_text_unknown_know_everything(word_tokenizer):
    word_tokenizer.eos_token = word_tokenizer.unk_token
    ids = torch.full((1, 9), word_tokenizer.unk_token_id)
    assert unknown_remark(ids, word_tokenizer) is None
