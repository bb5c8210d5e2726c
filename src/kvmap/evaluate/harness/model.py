"""What the harness sees: a model class named `kvmap`, one instance per arm.

Tokenises as the harness's own `hf` model does, so that equal models get equal answers.
"""

from __future__ import annotations

from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

from kvmap.evaluate.harness.engine import Engine, Wish
from kvmap.evaluate.items import Ids

MAX_NEW_TOKENS = 256


@register_model("kvmap")
class KvmapModel(TemplateLM):
    """One arm of a pair under evaluation; answers come from the shared engine."""

    def __init__(self, engine: Engine, arm: str) -> None:
        super().__init__()
        self.engine = engine
        self.arm = arm
        self.tokenizer = engine.pair.target.tokenizer
        self._device = engine.pair.target.device
        self.rolled: dict[str, list[tuple[Ids, Ids]]] = {}

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def max_length(self) -> int:
        return self.engine.max_length

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Encode as the tokenizer does by default, without a second opening token."""
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if add_special_tokens is None and self._opened(string):
            options = {"add_special_tokens": False}
        return self.tokenizer.encode(string, **options)

    def _opened(self, string: str) -> bool:
        return string.startswith(self.tokenizer.decode(self.prefix_token_id))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple]:
        """Score continuations; the progress shown is the engine's."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(self, requests: list[tuple], **_: Any) -> list[tuple[float, bool]]:
        pairings = [(tuple(context), tuple(answer)) for _, context, answer in requests]
        self.engine.score(pairings)
        found = [self.engine.likelihoods.get((self.arm, pairing)) for pairing in pairings]
        return [(one.total, one.greedy) if one else (float("nan"), False) for one in found]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Return each text's log-likelihood over windows; their second halves are mapped."""
        self.rolled = {request.args[0]: self._windows(request.args[0]) for request in requests}
        halves = [pairing for windows in self.rolled.values() for pairing in windows]
        self.engine.score(halves)
        found = lambda pairing: self.engine.likelihoods.get((self.arm, pairing))  # noqa: E731
        totals = []
        for request in requests:
            parts = [found(pairing) for pairing in self.rolled[request.args[0]]]
            totals.append(sum(part.total if part else float("nan") for part in parts))
        return totals

    def _windows(self, text: str) -> list[tuple[Ids, Ids]]:
        """Return (context, continuation) of both halves of each window.

        The first half's context is one token, so that it is scored natively.
        """
        windows = utils.get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        halves = []
        for context, scored in map(utils.make_disjoint_window, windows):
            context, scored = tuple(context), tuple(scored)
            half = len(scored) // 2
            if half:
                halves.append((context, scored[:half]))
            halves.append((context + scored[:half], scored[half:]))
        return halves

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Generate greedily; the harness's sampling options are not served."""
        wishes = [self._wish(*request.args) for request in requests]
        self.engine.speak(wishes)
        return [self.engine.texts.get((self.arm, wish), "") for wish in wishes]

    def _wish(self, context: str, options: dict[str, Any]) -> Wish:
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        if self.eot_token_id is not None:
            until.append(self.tokenizer.decode(self.eot_token_id))
        most = int(options.get("max_gen_toks") or MAX_NEW_TOKENS)
        return Wish(tuple(self.tok_encode(context)), tuple(dict.fromkeys(until)), most)

    @property
    def tokenizer_name(self) -> str:
        return self.engine.pair.target.signature.name

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Lay a conversation out by the target's template."""
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    @property
    def device(self) -> torch.device:
        return self._device
