"""A conversation handed back and forth: the target answers one turn, the source the next.

Both keep a cache of everything said. What one of them reads natively, its own answer
included, is handed to the other by the map of that direction, at its positions: mapped, but
for the last tokens, which the other runs itself as in any handoff. Beside it stands the same
alternation in which both read everything themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvmap.cache import KVCache, concat
from kvmap.evaluate.arms import Pair
from kvmap.evaluate.items import Item, Task, encode
from kvmap.evaluate.scoring import Answer, ask
from kvmap.handoff import handoff, map_middle
from kvmap.mapping import CacheMap
from kvmap.models import LoadedModel, prefill

ARMS = ("alternate", "alternate_native")


@dataclass(frozen=True, eq=False)
class _Side:
    """A model, and the map that fills its cache from the other's."""

    loaded: LoadedModel
    cmap: CacheMap


def alternate(pair: Pair, item: Item, task: Task) -> dict[str, list[Answer]]:
    """Return the answers of a conversation that passes back and forth, by arm."""
    assert pair.back is not None
    sides = (_Side(pair.target, pair.cmap), _Side(pair.source, pair.back))
    ids = torch.tensor([item.context])
    source, native = prefill(pair.source, ids)[0], prefill(pair.target, ids)[0]
    mapped = handoff(pair.cmap, pair.target, source, ids).cache
    return {
        "alternate": _talk(sides, [mapped, source], item, task, carry=True),
        "alternate_native": _talk(sides, [native, source], item, task, carry=False),
    }


def _talk(
    sides: tuple[_Side, _Side], caches: list[KVCache], item: Item, task: Task, carry: bool
) -> list[Answer]:
    """Ask turn by turn; `carry` hands each turn to the listener, who else reads it natively."""
    answers = []
    for number, probe in enumerate(item.probes):
        speaker = number % 2
        listener, reader = 1 - speaker, sides[speaker].loaded
        answer = ask(reader, caches[speaker], [probe], task.max_new_tokens)[0]
        said = probe.answer
        if task.history == "own":
            said = encode(reader.tokenizer, f" {answer.text}")
        turn = torch.tensor([probe.prompt + said + probe.closing])
        caches[speaker] = prefill(reader, turn, past=caches[speaker])[0]
        heard = caches[listener]
        if carry:
            heard, turn = _carry(sides[listener], heard, caches[speaker], turn)
        caches[listener] = prefill(sides[listener].loaded, turn, past=heard)[0]
        answers.append(answer)
    return answers


def _carry(side: _Side, heard: KVCache, spoken: KVCache, turn: Tensor) -> tuple[KVCache, Tensor]:
    """Map what was said since a listener last read, but for the tail: return it and the tail."""
    tail = min(side.cmap.options.tail_length(spoken.tokens), turn.shape[1])
    start, stop = heard.tokens, spoken.tokens - tail
    if stop > start:
        middle, before = spoken.slice(start, stop), spoken.slice(0, start)
        mapped = map_middle(side.cmap, side.loaded, middle, past=heard, before=before)
        heard = concat(heard, mapped)
    return heard, turn[:, turn.shape[1] - tail :]
