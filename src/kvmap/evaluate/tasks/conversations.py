"""Conversations handed over at a turn and gone on with to their end.

The source reads the story and the turns before the hand-over, answered right; the target
answers the rest, one question after the other. Reports group by turn: the difference between
native and mapped at the same turn is the drift.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kvmap.demo import world
from kvmap.errors import UsageError
from kvmap.evaluate.items import Item, Probe, Task, encode
from kvmap.evaluate.tasks.demo import check_length
from kvmap.evaluate.tasks.options import TaskOptions
from kvmap.evaluate.tasks.rows import Source, read
from kvmap.text import read_file

TURNS = 10
STORY_TOKENS = 256
COQA = Source("stanfordnlp/coqa", "validation", ("coqa",), ("story", "questions", "answers"))
CHAT_TOKENS = 64


@dataclass(frozen=True)
class Turn:
    """A question as it stands in the text, its right answers, and what ends the turn."""

    prompt: str
    answers: tuple[str, ...]
    closing: str
    lead: str = " "  # between prompt and answer

    @property
    def answered(self) -> str:
        """The whole turn with its first right answer."""
        return f"{self.prompt}{self.lead}{self.answers[0]}{self.closing}"


def demo_conversations(options: TaskOptions) -> Task:
    """Return the embedded world's conversations; answers are one word."""
    length = (options.lengths or (STORY_TOKENS,))[0]
    check_length("demo_conversations", length)
    count = _talks(options, options.generated)
    rows = world.conversations("evaluation", count, length, TURNS, options.seed)
    talks = []
    for row in rows:
        answered = zip(row["questions"], row["answers"]["input_text"], strict=True)
        turns = [Turn(f" {prompt}", (answer,), " .") for prompt, answer in answered]
        talks.append((row["story"], turns))
    return _task("demo_conversations", talks, options, max_new_tokens=1)


def coqa(options: TaskOptions) -> Task:
    """Return CoQA's conversations, all the human answers as references.

    Raises:
        UsageError: The rows are not there, have other columns, or no conversation is long enough.
    """
    limit = _talks(options, options.limit)
    talks = map(_coqa_talk, read("coqa", COQA, options.data))
    return _task("coqa", talks, options, max_new_tokens=24, limit=limit)


def chat(options: TaskOptions) -> Task:
    """Return a file's own conversations: JSON lines with `messages` of role and content.

    Raises:
        UsageError: There is no such file, a conversation is not laid out so, or none is long
            enough.
    """
    if options.data is None or not Path(options.data).is_file():
        raise UsageError("task chat reads a file of conversations; pass it with `--messages FILE`")
    if not options.tokenizer.chat_template:
        raise UsageError("task chat lays conversations out by a chat template; this model has none")
    talks = []
    for number, row in enumerate(_messages(Path(options.data)), 1):
        try:
            talks.append(_chat_talk(row, options.tokenizer))
        except Exception as error:  # templates raise what they like
            raise UsageError(
                f"{options.data}: the chat template refuses conversation {number}"
            ) from error
    return _task("chat", talks, options, max_new_tokens=CHAT_TOKENS)


def _talks(options: TaskOptions, limit: int | None) -> int | None:
    """Return how many conversations a limit on turns leaves room for."""
    asked = TURNS - options.turn + 1
    if asked < 1:
        raise UsageError(f"found --turn {options.turn}, expected 1 to {TURNS}")
    return None if limit is None else -(-limit // asked)


def _task(
    name: str,
    talks: Iterable[tuple[str, Sequence[Turn]]],
    options: TaskOptions,
    max_new_tokens: int,
    limit: int | None = None,
) -> Task:
    """Return the conversations that have turns left at the hand-over, as many as the limit."""
    lengths: list[int] = []

    def long_enough() -> Iterator[Item]:
        for story, turns in talks:
            lengths.append(len(turns))
            if len(turns) >= options.turn:
                yield _item(story, turns, options)

    items = tuple(islice(long_enough(), limit))
    if not items and options.limit != 0:
        most = max(lengths, default=0)
        others = "--messages" if name == "chat" else "--data"
        smaller = " or a smaller --turn" if options.turn > 1 else ""
        raise UsageError(
            f"task {name} has no items: the longest of {len(lengths)} conversations read has "
            f"{most} answered turns, expected at least {options.turn}; pass other ones with "
            f"{others}{smaller}"
        )
    return Task(name, items, 0.0, max_new_tokens, options.history)


def _item(story: str, turns: Sequence[Turn], options: TaskOptions) -> Item:
    encoded = lambda text: encode(options.tokenizer, text)  # noqa: E731
    before = "".join(turn.answered for turn in turns[: options.turn - 1])
    probes = [
        Probe(
            prompt=encoded(turn.prompt),
            answer=encoded(f"{turn.lead}{turn.answers[0]}"),
            references=turn.answers,
            closing=encoded(turn.closing),
            labels={"turn": number},
        )
        for number, turn in enumerate(turns[:TURNS], 1)
        if number >= options.turn
    ]
    context = encode(options.tokenizer, story + before, special=True)
    if not story + before:
        # Nothing precedes the first question: the source reads it, all but its last token.
        whole = encode(options.tokenizer, turns[0].prompt, special=True)
        context, probes[0] = whole[:-1], replace(probes[0], prompt=whole[-1:])
    return Item(context, tuple(probes))


def _coqa_talk(row: dict[str, Any]) -> tuple[str, list[Turn]]:
    try:
        first = row["answers"]["input_text"]
        others = [extra["input_text"] for extra in _additional(row)]
        counts = {len(found) for found in (row["questions"], first, *others)}
    except (AttributeError, KeyError, TypeError) as error:
        raise UsageError(f"task coqa: a row is not laid out as in {COQA.hub}") from error
    said = [text for found in (row["questions"], first, *others) for text in found]
    if len(counts) > 1 or not all(isinstance(text, str) for text in said) or not all(first):
        raise UsageError("task coqa: a conversation has not one answer for each question")
    turns = [
        Turn(f"\nQ: {question}\nA:", tuple(dict.fromkeys(answers)), "")
        for question, *answers in zip(row["questions"], first, *others, strict=True)
    ]
    return f"{row['story']}\n", turns


def _additional(row: dict[str, Any]) -> list[dict[str, Any]]:
    found = row.get("additional_answers") or {}
    return [found[key] for key in sorted(found) if found[key] and found[key].get("input_text")]


def _messages(path: Path) -> Iterator[list[dict[str, str]]]:
    """Yield conversations from JSON lines, or from one JSON file."""
    text = read_file(path)
    try:
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        try:
            lines = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}: is neither JSON nor JSON lines") from error
        lines = lines if isinstance(lines, list) else [lines]
    if lines and all(isinstance(line, dict) and "role" in line for line in lines):
        lines = [lines]
    for number, line in enumerate(lines, 1):
        found = line.get("messages") if isinstance(line, dict) else line
        if not isinstance(found, list) or not all(map(_is_message, found)):
            raise UsageError(f"{path}: conversation {number} is no list of role and content")
        yield found


def _is_message(found: Any) -> bool:
    """Say whether this is text by someone; an assistant has said something."""
    if not isinstance(found, dict):
        return False
    role, content = found.get("role"), found.get("content")
    said = isinstance(role, str) and isinstance(content, str)
    return said and (role != "assistant" or bool(content.strip()))


def _chat_talk(messages: list[dict[str, str]], tokenizer: Any) -> tuple[str, list[Turn]]:
    """Lay a conversation out by the chat template, cut where the assistant begins and ends."""
    lay = lambda part, prompt: tokenizer.apply_chat_template(  # noqa: E731
        part, tokenize=False, add_generation_prompt=prompt
    )
    turns, done = [], ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked, answered = lay(messages[:index], True), lay(messages[: index + 1], False)
        closing = answered[len(asked) :].removeprefix(message["content"])
        turns.append(Turn(asked[len(done) :], (message["content"],), closing, lead=""))
        done = answered
    return "", turns
