"""Ask a model an item's probes, given a cache of the item's context.

All probes of an item run as one padded batch over the same cache. Pads stand on the right:
attention is causal, so no real token sees them. What is equal is run once: with choices of
one token each, a question costs one row however many choices it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap import metrics
from kvmap.cache import KVCache
from kvmap.evaluate.items import Ids, Item, Probe, Task, encode
from kvmap.models import LoadedModel, continue_logits, generate, prefill

# Largest batch of logits and of expanded caches, in bytes.
BATCH_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Answer:
    """What a model made of a probe.

    Attributes:
        logits: [A, V] fp32, predicting the A tokens of the right answer.
        choices: [C] log-likelihood of each choice in nats; empty where there are none.
        text: What it said, where it was asked to speak.
    """

    logits: Tensor
    choices: Tensor
    text: str | None = None


@torch.no_grad()
def ask(
    loaded: LoadedModel, cache: KVCache | None, probes: Sequence[Probe], max_new_tokens: int = 16
) -> list[Answer]:
    """Return a model's answers given a cache of the context (batch of one); None is no context."""
    rows = {row: None for probe in probes for row in _rows(probe)}
    predictions = dict(_run(loaded, cache, list(rows)))
    return [_answer(loaded, cache, probe, predictions, max_new_tokens) for probe in probes]


def converse(loaded: LoadedModel, cache: KVCache | None, item: Item, task: Task) -> list[Answer]:
    """Return answers to questions asked one after the other, each over all that was said before.

    With the history "own", what the reader said stands in its cache, right or wrong, so that
    what a mapped cache costs can add up; likelihoods too are given that history.
    """
    answers = []
    for probe in item.probes:
        answer = ask(loaded, cache, [probe], task.max_new_tokens)[0]
        said = probe.answer
        if task.history == "own":
            said = encode(loaded.tokenizer, f" {answer.text}")
        turn = torch.tensor([probe.prompt + said + probe.closing])
        cache = prefill(loaded, turn, past=cache)[0]
        answers.append(answer)
    return answers


def _rows(probe: Probe) -> list[Ids]:
    """Return the token rows to run: the last token of a continuation predicts nothing needed."""
    return [probe.prompt + continuation[:-1] for continuation in (probe.answer, *probe.choices)]


def _run(
    loaded: LoadedModel, cache: KVCache | None, rows: list[Ids]
) -> Iterator[tuple[Ids, Tensor]]:
    """Yield each row with its logits [len(row), V]."""
    rows = sorted(rows, key=len)
    size = _batch_size(loaded, cache, len(rows[-1]))
    for start in range(0, len(rows), size):
        batch = rows[start : start + size]
        width = len(batch[-1])
        ids = torch.tensor([row + (row[-1],) * (width - len(row)) for row in batch])
        past = None if cache is None else cache.expand(len(batch))
        logits = continue_logits(loaded, past, ids)
        for row, found in zip(batch, logits, strict=True):
            yield row, found[: len(row)]


def _batch_size(loaded: LoadedModel, cache: KVCache | None, width: int) -> int:
    row_bytes = width * loaded.signature.geometry.vocabulary * 4 * 2
    row_bytes += 0 if cache is None else cache.bytes * 2
    return max(1, BATCH_BYTES // row_bytes)


def _answer(
    loaded: LoadedModel,
    cache: KVCache | None,
    probe: Probe,
    predictions: dict[Ids, Tensor],
    max_new_tokens: int,
) -> Answer:
    start = len(probe.prompt) - 1
    gold, *others = (predictions[row][start:].float() for row in _rows(probe))
    scores = [
        -metrics.negative_log_likelihood(logits, torch.tensor(choice, device=logits.device)).sum()
        for logits, choice in zip(others, probe.choices, strict=True)
    ]
    text = _speak(loaded, cache, probe, max_new_tokens) if probe.references else None
    return Answer(gold, torch.stack(scores) if scores else gold.new_zeros(0), text)


def _speak(loaded: LoadedModel, cache: KVCache | None, probe: Probe, max_new_tokens: int) -> str:
    """Generate greedily and return the first line."""
    prompt = torch.tensor([probe.prompt], device=loaded.device)
    if cache is not None:
        read = cache.token_ids if cache.token_ids is not None else cache.positions
        prompt = torch.cat((read.to(prompt.device), prompt), dim=1)
    produced = generate(loaded, cache, prompt, max_new_tokens)
    text = loaded.tokenizer.decode(produced[0], skip_special_tokens=True)
    return text.strip().split("\n")[0].strip()


def accuracy(probe: Probe, answer: Answer) -> float:
    """Return 1 for the right choice, the best F1 of a free answer, NaN where nothing is asked."""
    if probe.choices:
        return float(answer.choices.argmax().item() == probe.gold)
    if answer.text is not None:
        return metrics.coqa_f1(answer.text, probe.references)
    return float("nan")
