"""Running text: the second half of a chunk is scored given the cached first half.

The last token of the first half is run natively by whoever reads, so that every token of the
second half has a prediction: the context holds one token less than half of the chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
    """Return chunks of any text, each within one document.

    Raises:
        UsageError: The text cannot be read, or no document is long enough.
    """
    length = (options.lengths or (CHUNK,))[0]
    chunks, longest = _cut(options, _texts(options, length), length)
    if longest < length:
        raise UsageError(
            f"task text has no items: the longest document of {options.text} has {longest} tokens, "
            f"expected at least {length}; pass other text with --text, or, where the task text is "
            "asked for, a smaller --length"
        )
    return _task("text", chunks)


def wikitext2(options: TaskOptions) -> Task:
    """Return chunks of WikiText-2's test text, joined by blank lines as is usual.

    Raises:
        UsageError: The rows are not there, have other columns, or hold too little text.
    """
    length = (options.lengths or (WIKITEXT_CHUNK,))[0]
    texts = [row["text"] for row in read("wikitext2", WIKITEXT, options.data)]
    if not all(isinstance(text, str) for text in texts):
        raise UsageError("task wikitext2: a row's column text holds no text")
    chunks, found = _cut(options, ["\n\n".join(texts)], length)
    if found < length:
        raise UsageError(
            f"task wikitext2 has no items: {len(texts)} rows have {found} tokens together, "
            f"expected at least {length}; pass other rows with --data, or a smaller --length"
        )
    return _task("wikitext2", chunks)


def _task(name: str, chunks: Iterable[Ids]) -> Task:
    return Task(name, tuple(_item(chunk) for chunk in chunks))


def _item(chunk: Ids) -> Item:
    half = len(chunk) // 2
    return Item(chunk[: half - 1], (Probe(chunk[half - 1 : half], chunk[half:]),))


def _cut(options: TaskOptions, texts: Iterable[str], length: int) -> tuple[list[Ids], int]:
    """Return whole chunks of `length` tokens, as many as asked for, and the longest text's tokens.

    What is left over at the end of a text is dropped.
    """
    chunks: list[Ids] = []
    longest = 0
    for text in texts:
        ids = encode(options.tokenizer, text, special=True)
        longest = max(longest, len(ids))
        chunks += [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
        if options.limit is not None and len(chunks) >= options.limit:
            break
    return chunks[: options.limit], longest


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
