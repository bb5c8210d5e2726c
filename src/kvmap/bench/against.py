"""The target's prefill in another engine, as the baseline to beat."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from kvmap.bench.clock import Clock, Timing, timings
from kvmap.collect_pair import Loading
from kvmap.errors import UsageError
from kvmap.models import resolve

ENGINES = ("hf", "vllm")


def check_engine(name: str) -> None:
    """Check that a baseline can be run, before any work.

    Raises:
        UsageError: No such engine, or it is not installed.
    """
    if name not in ENGINES:
        raise UsageError(f"found --against {name!r}, expected {' or '.join(ENGINES)}")
    if name == "vllm" and find_spec("vllm") is None:
        raise UsageError(
            "--against vllm needs vllm, which cannot be imported here; "
            "run `pip install vllm`, or take --against hf"
        )


def vllm_prefill(
    name: str, contexts: list[int], clock: Clock, loading: Loading, budget: float, seed: int
) -> dict[int, Timing]:
    """Return vLLM's seconds to the first token, by length of context; no prefix is cached."""
    from vllm import LLM, SamplingParams

    checkpoint = resolve(name)
    engine = LLM(
        model=checkpoint.location,
        revision=checkpoint.revision,
        dtype=loading.dtype,
        trust_remote_code=loading.trust_remote_code,
        enable_prefix_caching=False,
        max_model_len=max(contexts) + 1,
        seed=seed,
    )
    one = SamplingParams(max_tokens=1, temperature=0.0)
    generator = torch.Generator().manual_seed(seed)
    vocabulary = engine.get_tokenizer().vocab_size

    def run(tokens: int) -> dict[str, float]:
        ids = torch.randint(vocabulary, (tokens,), generator=generator).tolist()
        prompts = [{"prompt_token_ids": ids}]
        return {"prefill": clock.timed(lambda: engine.generate(prompts, one, use_tqdm=False))[1]}

    return {tokens: timings(lambda n=tokens: run(n), budget)["prefill"] for tokens in contexts}
