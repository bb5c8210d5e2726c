"""Names people type for checkpoints, and the published shapes behind them.

The shapes let `plan` and `bench --random-weights` work without a download. Light: no torch.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmap import demo
from kvmap.errors import UsageError

CONFIG = "config.json"


@dataclass(frozen=True)
class Checkpoint:
    """Where a model's files are: a local folder or a hub id, with a revision for the latter."""

    name: str
    location: str
    revision: str | None = None

    @property
    def local(self) -> bool:
        """Whether the location is a folder on this machine."""
        return Path(self.location).is_dir()


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _family(
    model_type: str, vocabulary: int, positions: int, rope: dict, **common: Any
) -> dict[str, Any]:
    shared = {
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rope_parameters": rope,
    }
    return {"model_type": model_type, **shared, **common}


def _shape(
    family: dict, layers: int, hidden: int, ffn: int, heads: tuple[int, int, int], tied=False
) -> dict:
    query_heads, kv_heads, head_size = heads
    return family | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "tie_word_embeddings": tied,
    }


_QWEN3 = _family("qwen3", 151936, 40960, {"rope_type": "default", "rope_theta": 1000000.0})
_LLAMA31 = _family("llama", 128256, 131072, _LLAMA3_ROPE | {"factor": 8.0})
_LLAMA32 = _family("llama", 128256, 131072, _LLAMA3_ROPE | {"factor": 32.0})
_MINISTRAL3 = _family("ministral3", 131072, 262144, _MINISTRAL_ROPE)
_SMOLLM2 = _family(
    "llama", 49152, 8192, {"rope_type": "default", "rope_theta": 100000.0}, tie_word_embeddings=True
)

# name: (hub id, config of the published checkpoint; None where its own config file is at hand)
KNOWN: dict[str, tuple[str, dict[str, Any] | None]] = {
    "qwen3-0.6b": ("Qwen/Qwen3-0.6B", _shape(_QWEN3, 28, 1024, 3072, (16, 8, 128), True)),
    "qwen3-1.7b": ("Qwen/Qwen3-1.7B", _shape(_QWEN3, 28, 2048, 6144, (16, 8, 128), True)),
    "qwen3-4b": ("Qwen/Qwen3-4B", _shape(_QWEN3, 36, 2560, 9728, (32, 8, 128), True)),
    "qwen3-8b": ("Qwen/Qwen3-8B", _shape(_QWEN3, 36, 4096, 12288, (32, 8, 128))),
    "qwen3-14b": ("Qwen/Qwen3-14B", _shape(_QWEN3, 40, 5120, 17408, (40, 8, 128))),
    "qwen3-32b": ("Qwen/Qwen3-32B", _shape(_QWEN3, 64, 5120, 25600, (64, 8, 128))),
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B-Instruct",
        _shape(_LLAMA31, 32, 4096, 14336, (32, 8, 128)),
    ),
    "llama-3.1-70b": (
        "meta-llama/Llama-3.1-70B-Instruct",
        _shape(_LLAMA31, 80, 8192, 28672, (64, 8, 128)),
    ),
    "llama-3.2-1b": (
        "meta-llama/Llama-3.2-1B-Instruct",
        _shape(_LLAMA32, 16, 2048, 8192, (32, 8, 64), True),
    ),
    "llama-3.2-3b": (
        "meta-llama/Llama-3.2-3B-Instruct",
        _shape(_LLAMA32, 28, 3072, 8192, (24, 8, 128), True),
    ),
    "ministral-3-3b": (
        "mistralai/Ministral-3-3B-Instruct-2512",
        _shape(_MINISTRAL3, 26, 3072, 9216, (32, 8, 128), True),
    ),
    "ministral-3-8b": (
        "mistralai/Ministral-3-8B-Instruct-2512",
        _shape(_MINISTRAL3, 34, 4096, 14336, (32, 8, 128)),
    ),
    "ministral-3-14b": (
        "mistralai/Ministral-3-14B-Instruct-2512",
        _shape(_MINISTRAL3, 40, 5120, 16384, (32, 8, 128)),
    ),
    "smollm2-135m": (
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        _shape(_SMOLLM2, 30, 576, 1536, (9, 3, 64), True),
    ),
    "smollm2-360m": (
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        _shape(_SMOLLM2, 32, 960, 2560, (15, 5, 64), True),
    ),
    "smollm2-1.7b": (
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        _shape(
            _SMOLLM2 | {"rope_parameters": {"rope_type": "default", "rope_theta": 130000.0}},
            24,
            2048,
            8192,
            (32, 32, 64),
            True,
        ),
    ),
}


def names() -> list[str]:
    """Return every name `resolve` knows."""
    return [*demo.MODELS, *KNOWN]


def resolve(name: str) -> Checkpoint:
    """Return the checkpoint behind a known name, a local folder or a hub id (`id@revision`).

    Raises:
        UsageError: Nothing of that name; says what is near.
    """
    if name in demo.MODELS:
        return Checkpoint(name, str(demo.checkpoint_path(name)))
    if os.path.isdir(name):  # which takes a name of any length
        return Checkpoint(name, str(Path(name).resolve()))
    base, _, revision = name.partition("@")
    known = KNOWN.get(base.lower())
    if known:
        return Checkpoint(name, known[0], revision or None)
    if base.count("/") == 1 and not base.startswith((".", "/", "~")):
        return Checkpoint(name, base, revision or None)
    raise UsageError(_unknown(name))


def is_checkpoint(name: str) -> bool:
    """Say whether a text is a known name or hub id, or a folder with a config."""
    base = name.partition("@")[0].lower()
    ids = {hub_id.lower() for hub_id, _ in KNOWN.values()}
    known = name in demo.MODELS or base in KNOWN or base in ids
    return known or os.path.isfile(os.path.join(name, CONFIG))  # which takes a name of any length


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), names(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else "`kvmap models` lists the names known"
    return (
        f"no model named {name!r}: neither a known name, a folder nor a hub id (owner/name); {hint}"
    )
