"""How near two things are: pure functions, tensors or strings in, tensors or floats out.

Logits come as [..., V]; probabilities are natural, so likelihoods and divergences are in
nats. Nothing here knows models, files or tasks.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def r2_from_sums(residual: Tensor, total: Tensor) -> Tensor:
    """Return R² from residual and total sums of squares of any equal shape."""
    exact = torch.where(residual == 0, 1.0, -torch.inf).to(residual.dtype)
    return torch.where(
        total > 0, 1 - residual / total.clamp_min(torch.finfo(total.dtype).tiny), exact
    )


def cosine(first: Tensor, second: Tensor) -> Tensor:
    """Return the cosine along the last axis, fp32; two zero vectors agree, one alone does not."""
    first, second = first.float(), second.float()
    zero = (first == 0).all(-1) & (second == 0).all(-1)
    return torch.where(zero, 1.0, torch.nn.functional.cosine_similarity(first, second, dim=-1))


def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Return KL(p || q) in nats for each token: logits [..., V] -> [...], fp32, never negative."""
    p, q = _common_vocabulary(p_logits, q_logits)
    log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
    # A probability of zero contributes nothing, though 0 * inf is NaN.
    terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q))
    return terms.sum(-1).clamp_min(0)


def top1_agreement(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """Return whether the likeliest tokens agree: logits [..., V] -> bool [...]."""
    p, q = _common_vocabulary(p_logits, q_logits)
    return p.argmax(-1) == q.argmax(-1)


def negative_log_likelihood(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return nats per token: logits [..., V] that predict token_ids [...] -> [...], fp32."""
    logits = logits.float()
    chosen = logits.gather(-1, token_ids[..., None]).squeeze(-1)
    return logits.logsumexp(-1) - chosen


def mean_and_p95(values: Tensor) -> tuple[float, float]:
    """Return the mean and the 95th percentile of a flat tensor that is not empty."""
    values = values.double()
    return values.mean().item(), values.quantile(0.95).item()


def _common_vocabulary(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    # Models that share a tokenizer may pad their output to different widths.
    width = min(p.shape[-1], q.shape[-1])
    return p[..., :width], q[..., :width]


def normalise_answer(text: str) -> str:
    """Return the text in lower case, single-spaced, without punctuation and articles."""
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def token_f1(prediction: str, reference: str) -> float:
    """Return the F1 of the bags of normalised words; two empty answers agree."""
    given, wanted = normalise_answer(prediction).split(), normalise_answer(reference).split()
    if not given or not wanted:
        return float(given == wanted)
    shared = sum((Counter(given) & Counter(wanted)).values())
    return 2 * shared / (len(given) + len(wanted))


def coqa_f1(prediction: str, references: Sequence[str]) -> float:
    """Return CoQA's F1: the best over references, averaged over leaving each of them out.

    Leaving one out makes a model comparable with a human, who is scored against the
    others (Reddy et al., arXiv 1808.07042, section 6). With one reference, its F1.
    """
    scores = [token_f1(prediction, reference) for reference in references]
    if len(scores) < 2:
        return max(scores, default=0.0)
    held_out = (scores[:i] + scores[i + 1 :] for i in range(len(scores)))
    return sum(map(max, held_out)) / len(scores)
