"""Running text: the second half of a chunk is scored given the cached first half.

The last token of the first half is run natively by whoever reads, so that every token of the
second half has a prediction: the context holds one token less than half of the chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from kvmap.demo import world
from kvmap.errors import UsageError
from kvmap.evaluate.items import Ids, Item, Probe, Task, encode
from kvmap.evaluate.tasks.options import TaskOptions
from kvmap.evaluate.tasks.rows import Source, read
from kvmap.text import documents

CHUNK = 512
WIKITEXT_CHUNK = 2048
WIKITEXT = Source(
    "Salesforce/wikitext:wikitext-2-raw-v1", "test", ("wikitext-2-raw-v1",), ("text",)
)


def perplexity(options: TaskOptions) -> Task:
    """Return chunks of any text, each within one document."""
    length = (options.lengths or (CHUNK,))[0]
    texts = _texts(options, length)
    pieces = (piece for text in texts for piece in _cut(options.tokenizer, text, length))
    return _task("text", islice(pieces, options.limit))


def wikitext2(options: TaskOptions) -> Task:
    """Return chunks of WikiText-2's test text, joined by blank lines as is usual.

    Raises:
        UsageError: The rows are not there or have other columns.
    """
    length = (options.lengths or (WIKITEXT_CHUNK,))[0]
    texts = [row["text"] for row in read("wikitext2", WIKITEXT, options.data)]
    if not all(isinstance(text, str) for text in texts):
        raise UsageError("task wikitext2: a row's column text holds no text")
    text = "\n\n".join(texts)
    return _task("wikitext2", islice(_cut(options.tokenizer, text, length), options.limit))


def _task(name: str, pieces: Iterable[Ids]) -> Task:
    return Task(name, tuple(_item(piece) for piece in pieces))


def _item(piece: Ids) -> Item:
    half = len(piece) // 2
    return Item(piece[: half - 1], (Probe(piece[half - 1 : half], piece[half:]),))


def _cut(tokenizer: Any, text: str, length: int) -> Iterator[Ids]:
    """Yield whole chunks of `length` tokens; what is left over at the end is dropped."""
    ids = encode(tokenizer, text, special=True)
    for start in range(0, len(ids) - length + 1, length):
        yield ids[start : start + length]


def _texts(options: TaskOptions, length: int) -> Iterator[str]:
    """Yield documents of a test split, where there is one.

    The embedded world's are of its evaluation split, questions answered.
    """
    if options.text != "demo":
        yield from documents(options.text, "test", options.tokenizer)
        return
    tokens = min(max(length, world.SHORTEST), world.LONGEST)
    for document in world.documents("evaluation", 10_000, tokens, options.seed + 1):
        asked = [f"{question.prompt} {question.answer} ." for question in document.questions]
        yield " ".join((document.text, *asked))
