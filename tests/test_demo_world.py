"""The demo world is what its documents say it is.

The reader here shares no code with the generator: it knows the sentences only
by their words, replays them in order and answers from what it has read.
"""

from __future__ import annotations

import re

import pytest

from kvmap.demo import words, world

LENGTHS = (64, 100, 128, 256, 512, 1024, 4096)
SENTENCES = {
    "serve": r"they serve (\w+) (\w+)",
    "call": r"people call (\w+) (\w+)",
    "gave": r"friends gave (\w+) (\w+)",
    "pay": r"banks pay (\w+) (\w+) coins",
    "paint": r"artists paint (\w+) (\w+)",
    "lead": r"at \w+ roads (?:lead|return) (\w+) (\w+)",
    "holds": r"at \w+ \w+ hands? (\w+) (\w+)",
}


class Reader:
    """Reads sentences, keeps only the newest value of everything, answers questions."""

    def __init__(self, text: str):
        self.facts: dict[str, dict[str, str]] = {name: {} for name in SENTENCES}
        for sentence in text.split(" ."):
            for name, pattern in SENTENCES.items():
                if match := re.fullmatch(pattern, sentence.strip()):
                    key, value = match.groups()
                    if name == "holds":
                        key, value = value, key
                    self.facts[name][key] = value

    def answer(self, prompt: str) -> str:
        said = prompt.split()
        last = said[-1]
        if last == "to":
            pay = {n: words.NUMBERS.index(v) for n, v in self.facts["pay"].items()}
            return (max if "most" in said else min)(pay, key=pay.get)
        if said[1] in ("who", "what"):
            backwards = {"gets": "serve", "works": "call", "owns": "gave", "looks": "paint"}
            return (
                self.facts["holds"][last]
                if "holds" in said
                else self._who(backwards[said[2]], last)
            )
        (relation,) = set(said) & set(SENTENCES)
        subject = self._who("gave", last) if "owner" in said else last
        return self.facts[relation][subject]

    def _who(self, relation: str, value: str) -> str:
        (found,) = (k for k, v in self.facts[relation].items() if v == value)
        return found


@pytest.mark.parametrize("tokens", LENGTHS)
def test_an_independent_reader_answers_every_question(tokens):
    for document in world.documents("evaluation", 12, tokens, seed=3, questions=20):
        reader = Reader(document.text)
        for question in document.questions:
            assert reader.answer(question.prompt) == question.answer, (document.text, question)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_documents_fill_their_length_and_never_exceed_it(tokens):
    lengths = [len(d.text.split()) for d in world.documents("train", 12, tokens)]
    assert max(lengths) <= tokens
    assert min(lengths) > tokens - 20, "a sentence of prose is at most 18 words"


@pytest.mark.parametrize("tokens", LENGTHS)
def test_every_kind_is_asked_and_no_question_twice(tokens):
    for document in world.documents("evaluation", 12, tokens, questions=8):
        assert {q.kind for q in document.questions} == set(world.KINDS)
        assert len({q.prompt for q in document.questions}) == len(document.questions) == 8


def test_latest_asks_only_of_what_changed():
    for document in world.documents("evaluation", 30, 256):
        for question in document.questions:
            if question.kind == "latest":
                subject = question.prompt.split()[-1]
                assert len(re.findall(rf"at \w+ [^.]*\b{subject}\b", document.text)) > 1


def test_choices_hold_the_answer_once_among_words_of_its_class():
    for document in world.documents("calibration", 30, 256):
        for question in document.questions:
            group = next(g for g in words.CLASSES.values() if question.answer in g)
            assert len(question.choices) == len(set(question.choices)) == 12
            assert question.answer in question.choices
            assert set(question.choices) <= set(group)


def test_splits_share_no_seed_and_no_document():
    made = {s: list(world.documents(s, 200, 64)) for s in world.SPLITS}
    for a, b in (("train", "calibration"), ("train", "evaluation"), ("calibration", "evaluation")):
        assert not {d.seed for d in made[a]} & {d.seed for d in made[b]}
        assert not {d.text for d in made[a]} & {d.text for d in made[b]}
    assert len({d.text for d in made["train"]}) == 200


def test_seed_ranges_of_splits_are_disjoint_for_every_path():
    tops = {s: {world.seed_of(s, "x", i) >> 48 for i in range(500)} for s in world.SPLITS}
    assert [len(t) for t in tops.values()] == [1, 1, 1]
    assert len(set().union(*tops.values())) == 3


def test_the_same_seed_gives_the_same_document_and_another_gives_another():
    first, again, other = (next(world.documents("train", 1, 128, seed=s)) for s in (1, 1, 2))
    assert first == again
    assert first.text != other.text


def test_an_unknown_split_or_length_is_refused_by_name():
    with pytest.raises(ValueError, match="split: found 'test', expected one of train, calib"):
        next(world.documents("test", 1, 128))
    with pytest.raises(ValueError, match="tokens: found 63, expected 64 to 4096"):
        next(world.documents("train", 1, 63))


def test_words_are_single_tokens_and_belong_to_one_class():
    vocabulary = words.vocabulary()
    assert len(vocabulary) == len(set(vocabulary)) <= 1024
    spoken = set()
    for text in world.calibration_texts(40, 256):
        spoken |= set(text.split())
    for row in world.conversations("train", 40, 128):
        spoken |= set(" ".join(row["questions"]).split())
    assert spoken <= set(vocabulary)


@pytest.mark.parametrize("tokens", [64, 256, 2048])
def test_calibration_texts_are_as_long_as_asked_and_hold_questions(tokens):
    texts = list(world.calibration_texts(10, tokens))
    assert min(len(t.split()) for t in texts) >= tokens
    assert sum(" so " in t for t in texts) > 4
    assert len(set(texts)) == 10


def test_conversations_have_the_columns_of_coqa_and_lean_on_earlier_turns():
    rows = list(world.conversations("evaluation", 20, 256, turns=10))
    leaning = 0
    for row in rows:
        answers = row["answers"]
        assert set(row) == {"source", "story", "questions", "answers"}
        assert len(row["questions"]) == len(answers["input_text"]) == 10
        for word, start, end in zip(*answers.values(), strict=True):
            assert row["story"][start:end] == word
        leaning += sum(bool({"and", "him", "her"} & set(q.split())) for q in row["questions"])
    assert leaning > 80, "about half of the turns should need an earlier one"


def test_conversation_answers_follow_from_the_story_and_the_turns_before():
    for row in world.conversations("evaluation", 30, 256):
        reader, name, relation = Reader(row["story"]), "", ""
        for prompt, answer in zip(row["questions"], row["answers"]["input_text"], strict=True):
            said = prompt.split()
            if said[-1] in words.NAMES or said[-1] in ("him", "her"):
                name = said[-1] if said[-1] in words.NAMES else name
                relation = next(iter(set(said) & set(SENTENCES)), relation)
                assert reader.facts[relation][name] == answer, (row, prompt)
            else:
                assert reader.answer(prompt) == answer
            name = answer if answer in words.NAMES else name
