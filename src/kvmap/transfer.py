"""Let a target go on from what a source has read: the whole handoff, text in and text out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmap.cache import KVCache
from kvmap.errors import UsageError
from kvmap.handoff import Handoff, check_pair, handoff
from kvmap.mapping import CacheMap
from kvmap.models import LoadedModel, generate, prefill
from kvmap.text import read_file


@dataclass(frozen=True)
class Transfer:
    """A context [1, T] handed over: the source's cache and what became of it."""

    token_ids: Tensor
    source_cache: KVCache
    handoff: Handoff


def prompt_ids(tokenizer: Any, prompt: str) -> Tensor:
    """Return the token ids [1, T] of a prompt.

    Raises:
        UsageError: The prompt is too short, or holds what is no text.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError("the prompt is not UTF-8 text; convert it") from error
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    return _long_enough(ids, "the prompt")


def message_ids(tokenizer: Any, path: Path) -> Tensor:
    """Return the token ids [1, T] of a conversation file, with the reply's opening added.

    Args:
        path: JSON, a list of {"role", "content"}.

    Raises:
        UsageError: The file is no such list, or the model has no chat template.
    """
    if not tokenizer.chat_template:
        raise UsageError("this model has no chat template; give the text with --prompt-file")
    try:
        messages = [_message(found) for found in _listed(json.loads(read_file(path)))]
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        rendered.encode()
    except UsageError:
        raise
    except Exception as error:  # templates raise what they like
        raise UsageError(
            f"{path}: expected a JSON list of messages with role and content that the chat "
            f"template takes ({type(error).__name__})"
        ) from error
    ids = tokenizer(rendered, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return _long_enough(ids, f"{path}: the conversation, as the chat template lays it out,")


def _long_enough(ids: Tensor, what: str) -> Tensor:
    if ids.shape[1] < 2:
        raise UsageError(f"{what} has {ids.shape[1]} tokens, expected at least 2")
    return ids.long()


def _listed(messages: Any) -> list[Any]:
    if not isinstance(messages, list) or not messages:
        raise TypeError("no list of messages")
    return messages


def _message(found: Any) -> dict[str, str]:
    message = {name: found[name] for name in ("role", "content")}
    if not all(isinstance(text, str) for text in message.values()):
        raise TypeError("role and content must be text")
    return message


def transfer(
    cmap: CacheMap,
    source: LoadedModel | None,
    target: LoadedModel,
    token_ids: Tensor,
    source_cache: KVCache | None = None,
) -> Transfer:
    """Hand a context [1, T] from the source to the target.

    Args:
        source: Prefills the context; may be None where its cache is given.

    Raises:
        UsageError: The models or the cache are not the map's.
    """
    check_pair(cmap, source, target)
    if source_cache is None:
        if source is None:
            raise UsageError("neither the source model nor its cache was given")
        source_cache, _ = prefill(source, token_ids)
    return Transfer(token_ids, source_cache, handoff(cmap, target, source_cache, token_ids))


def continuation(loaded: LoadedModel, cache: KVCache | None, token_ids: Tensor, length: int) -> str:
    """Return the text a model greedily adds to a context, from a cache or from nothing."""
    produced = generate(loaded, cache, token_ids, length)
    return loaded.tokenizer.decode(produced[0], skip_special_tokens=True)


def compare(
    done: Transfer, source: LoadedModel, target: LoadedModel, length: int
) -> dict[str, Any]:
    """Return the texts that follow a context: from the mapped cache, natively, and by the source.

    `top1_agreement` is the share of mapped tokens equal to the native ones, place by place.
    """
    mapped = generate(target, done.handoff.cache, done.token_ids, length)[0]
    native = generate(target, None, done.token_ids, length)[0]
    own = generate(source, done.source_cache, done.token_ids, length)[0]
    common = min(len(mapped), len(native))
    same = (mapped[:common] == native[:common]).sum().item() if common else 0
    decode = lambda loaded, ids: loaded.tokenizer.decode(ids, skip_special_tokens=True)  # noqa: E731
    return {
        "mapped": decode(target, mapped),
        "native": decode(target, native),
        "source": decode(source, own),
        "top1_agreement": same / max(len(mapped), len(native), 1),
    }


def require_batch_of_one(cache: KVCache) -> Tensor:
    """Return the token ids of a saved cache of one sequence.

    Raises:
        UsageError: It holds several sequences, no token ids, or no whole context.
    """
    if cache.token_ids is None or cache.positions.shape[0] != 1:
        raise UsageError("the cache holds several sequences or no token ids; transfer takes one")
    if cache.tokens < 2:
        raise UsageError(f"the cache has {cache.tokens} tokens, expected at least 2")
    if not torch.equal(cache.positions[0], torch.arange(cache.tokens)):
        raise UsageError(
            f"the cache's tokens do not stand at positions 0 to {cache.tokens - 1} one by one; "
            "transfer takes whole contexts"
        )
    return cache.token_ids
