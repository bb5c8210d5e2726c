"""Text to calibrate and evaluate on: where it comes from, and how it becomes token ids.

A source is the name `demo`, a hub data set (`owner/name`, `owner/name:config`, or the short
name `fineweb-edu`), a local .jsonl, .parquet or .txt file, or a folder of these. `#column`
after it names the column to read; otherwise a column of text, a conversation or a question
with its answer is found by itself. Several sources joined by commas take turns, document by
document. No message repeats text.
"""

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from sys import maxsize
from typing import Any

import torch
from torch import Tensor

from kvmap.errors import UsageError
from kvmap.rows import local_files, rows

TEXT_COLUMNS = ("text", "content", "story")
CHAT_COLUMNS = ("messages", "conversations")
ROLES = {"human": "user", "gpt": "assistant"}
# Of a long document no more is tokenised than could fill a sequence.
CHARACTERS_PER_TOKEN = 64
# Bytes of a file by which it is known again.
BEGINNING = 1 << 20
# Share of tokens that stand for what a tokenizer does not know: of more is told, or it is refused.
MUCH_UNKNOWN, MOST_UNKNOWN = 0.05, 0.5


def documents(
    sources: str,
    split: str = "train",
    tokenizer: Any = None,
    tokens: int = 1024,
    seed: int = 0,
    reached: Callable[[Path], None] = lambda file: None,
) -> Iterator[str]:
    """Yield the documents of one or several sources, none of them empty.

    Args:
        sources: As described above.
        split: Of a hub data set, or the beginning of the names of a folder's files where
            some begin so.
        tokenizer: Its chat template lays out conversations.
        tokens: Length of the demo's documents.
        seed: Of the demo's documents.
        reached: Told of each local file before its first document.

    Raises:
        UsageError: A source is missing, cannot be read, is empty or has no known column.
    """
    names = _names(sources)
    if not names:
        raise UsageError("no data set named; give a name, a file or a folder with `--dataset`")
    waiting = [_documents_of(name, split, tokenizer, tokens, seed, reached) for name in names]
    while waiting:
        for one in tuple(waiting):
            text = next(one, None)
            if text is None:
                waiting.remove(one)
            else:
                yield text


def local_sources(sources: str, split: str) -> list[Path]:
    """Return the local files that one or several sources may be read from."""
    wheres = [name.partition("#")[0] for name in _names(sources) if name != "demo"]
    return [file for where in wheres for file in local_files(where, split) or ()]


def beginnings(files: Iterable[Path]) -> dict[str, str]:
    """Return a digest of how each file begins, but for empty ones and what is read but once.

    Files are read from their beginning, so of two that begin alike the same text is read.
    """
    found = {}
    for file in filter(Path.is_file, files):
        with suppress(OSError), file.open("rb") as opened:
            if beginning := opened.read(BEGINNING):
                found[str(file)] = sha256(beginning).hexdigest()
    return found


def _names(sources: str) -> list[str]:
    whole = bool(sources) and os.path.exists(sources)
    return [sources] if whole else [n.strip() for n in sources.split(",") if n.strip()]


def token_sequences(texts: Iterable[str], tokenizer: Any, length: int, count: int) -> Tensor:
    """Return token ids [N, T] of `count` sequences of `length` tokens.

    Each sequence starts where a document starts, takes further documents while it is short,
    and leaves the rest of a long one.

    Raises:
        UsageError: There is not text enough, or the tokenizer knows less than half of it.
    """
    sequences: list[list[int]] = []
    current: list[int] = []
    for text in texts if count else ():
        current += _encode(text[: length * CHARACTERS_PER_TOKEN], tokenizer, bool(current))
        if len(current) >= length:
            sequences.append(current[:length])
            current = []
        if len(sequences) == count:
            break
    if len(sequences) < count:
        found = f"{len(sequences)} sequences" if sequences else f"{len(current)} tokens"
        remedy = f"`--sequences {len(sequences)}`" if sequences else "a smaller `--length`"
        raise UsageError(
            f"the text gives {found}, expected {count} sequences of {length} tokens; "
            f"give more text with `--dataset`, or {remedy}"
        )
    token_ids = torch.tensor(sequences, dtype=torch.long).reshape(count, length)
    require_known(token_ids, tokenizer, "`--dataset`")
    return token_ids


def require_known(token_ids: Tensor, tokenizer: Any, ways: str) -> str | None:
    """Refuse text of which a tokenizer knows less than half, or return `unknown_remark`.

    Args:
        ways: Options that give other text.

    Raises:
        UsageError: Saying how much is unknown.
    """
    remark = unknown_remark(token_ids, tokenizer)
    if _unknown_share(token_ids, tokenizer) > MOST_UNKNOWN:
        raise UsageError(f"{remark}; give other text with {ways}")
    return remark


def _unknown_share(token_ids: Tensor, tokenizer: Any) -> float:
    """Return the share of token ids that stand for what a tokenizer does not know."""
    unknown_id = getattr(tokenizer, "unk_token_id", None)
    # Tokenizers of bytes know everything, and may name the end of a text for what they do not.
    if unknown_id is None or unknown_id in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        return 0.0
    return (token_ids == unknown_id).double().mean().item() if token_ids.numel() else 0.0


def unknown_remark(token_ids: Tensor, tokenizer: Any) -> str | None:
    """Say how much of a text a tokenizer does not know; None where that is little."""
    share = _unknown_share(token_ids, tokenizer)
    if share <= MUCH_UNKNOWN:
        return None
    return f"{share:.0%} of the text's tokens are unknown to the tokenizer: {tokenizer.unk_token}"


def read_file(path: Path) -> str:
    """Return a text file's text; pipes are read, devices are not, since some never end.

    Raises:
        UsageError: It cannot be read as text.
    """
    try:
        if stat.S_ISCHR(path.stat().st_mode):
            raise UsageError(f"{path}: is a device, where a text file was expected")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); give another file") from error
    except ValueError as error:
        raise UsageError(f"{path}: is not UTF-8 text; convert it") from error


def _encode(text: str, tokenizer: Any, joined: bool) -> list[int]:
    if joined:
        return tokenizer("\n\n" + text, add_special_tokens=False, verbose=False)["input_ids"]
    # A chat template has often written the first special token already.
    begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    return tokenizer(text, add_special_tokens=not begun, verbose=False)["input_ids"]


def _documents_of(
    source: str,
    split: str,
    tokenizer: Any,
    tokens: int,
    seed: int,
    reached: Callable[[Path], None],
) -> Iterator[str]:
    if source == "demo":
        from kvmap.demo import world

        yield from world.calibration_texts(maxsize, tokens, seed)
        return
    where, _, column = source.partition("#")
    found = False
    for place, row in rows(where, split, reached):
        text = _text_of(row, column, tokenizer, place).strip()
        found = found or bool(text)
        if text:
            yield text
    if not found:
        raise UsageError(f"{where}: holds no text; give another source")


def _text_of(row: Mapping[str, Any], column: str, tokenizer: Any, place: str) -> str:
    if column and column not in row:
        raise UsageError(f"{place}: no column {column!r}; found {', '.join(map(str, row))}")
    for name in (column,) if column else (*TEXT_COLUMNS, *CHAT_COLUMNS, "question"):
        value = row.get(name)
        if name == "question" and isinstance(value, str):
            return _conversation(_asked(row), tokenizer, place)
        if isinstance(value, str):
            return value
        if isinstance(value, list) and value:
            return _conversation(value, tokenizer, place)
    known = ", ".join((*TEXT_COLUMNS, *CHAT_COLUMNS, "question"))
    raise UsageError(
        f"{place}: no column to read; found {', '.join(map(str, row))}, expected one of {known}, "
        "or name one as in `--dataset rows.jsonl#column`"
    )


def _asked(row: Mapping[str, Any]) -> list[dict[str, str]]:
    turns = [{"role": "user", "content": row["question"]}]
    if isinstance(row.get("answer"), str):
        turns.append({"role": "assistant", "content": row["answer"]})
    return turns


def _conversation(turns: list[Any], tokenizer: Any, place: str) -> str:
    """Lay out a conversation by the model's own chat template; without one, line by line."""
    try:
        messages = [
            {
                "role": ROLES.get(role := turn.get("role") or turn["from"], role),
                "content": str(turn["content"] if "content" in turn else turn["value"]),
            }
            for turn in turns
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise UsageError(f"{place}: a turn of the conversation lacks role or content") from error
    if getattr(tokenizer, "chat_template", None) is None:
        return "\n".join(message["content"] for message in messages)
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:
        # Templates raise what they like, jinja's own errors among them.
        raise UsageError(f"{place}: the chat template refuses this conversation") from error
