"""What a checkpoint's config says: the cache's shape, the number of weights; nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvmap.errors import UsageError
from kvmap.geometry import Geometry
from kvmap.names import KNOWN, Checkpoint


def load_config(checkpoint: Checkpoint, trust_remote_code: bool = False) -> Any:
    """Read a checkpoint's config; of a known name that is not here, from the built-in table.

    Raises:
        UsageError: No config can be read.
    """
    from transformers import AutoConfig

    published = published_config(checkpoint.name)
    try:
        with told(checkpoint.name):
            config = AutoConfig.from_pretrained(
                checkpoint.location,
                revision=checkpoint.revision,
                trust_remote_code=trust_remote_code,
                # What is asked of shapes alone waits for no network.
                local_files_only=published is not None and checkpoint.revision is None,
            )
    except UsageError:
        if published is None:
            raise
        config = published
    return config.get_text_config(decoder=True)


def published_config(name: str) -> Any | None:
    """Return the config of a known name from the built-in table, None where there is none."""
    from transformers import AutoConfig

    _, shape = KNOWN.get(name.partition("@")[0].lower(), (None, None))
    if shape is None:
        return None
    return AutoConfig.for_model(**json.loads(json.dumps(shape)))


def shape_of(config: Any) -> Geometry:
    """Return the cache geometry a config states, without RoPE tables.

    Raises:
        UsageError: It states none.
    """
    with told(config.name_or_path or config.model_type):
        return _shape_of(config)


def _shape_of(config: Any) -> Geometry:
    query_heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    return Geometry(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or query_heads,
        head_size=head_size,
        query_heads=query_heads,
        hidden_size=config.hidden_size,
        vocabulary=config.vocab_size,
        max_positions=getattr(config, "max_position_embeddings", 0) or 0,
        model_type=config.model_type,
        rope=(),
    )


def parameter_count(config: Any, trust_remote_code: bool = False) -> int:
    """Return the number of parameters of a config's model; nothing is allocated.

    Raises:
        UsageError: There is no such language model.
    """
    return sum(parameter.numel() for parameter in _hollow(config, trust_remote_code).parameters())


def tape_width(config: Any, trust_remote_code: bool = False) -> int:
    """Return how many numbers of a token a layer keeps while gradients pass through it, frozen.

    A product with frozen weights keeps nothing. What is left: the residual stream before either
    norm; queries, and what attention makes of them; three of the gated MLP's inner channels;
    queries and keys once more where they have norms of their own.
    """
    shape = shape_of(config)
    queries = shape.query_heads * shape.head_size
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    normed = any(
        name.endswith("q_norm") for name, _ in _hollow(config, trust_remote_code).named_modules()
    )
    return 2 * config.hidden_size + 2 * queries + 3 * inner + normed * (queries + shape.width)


def _hollow(config: Any, trust_remote_code: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with told(config.name_or_path or config.model_type), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


@contextmanager
def told(name: str, what: str = "model") -> Iterator[None]:
    """Say in one sentence that a checkpoint's files cannot be used.

    They are anybody's, and what transformers raises over them is whatever they break.
    """
    try:
        yield
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"cannot load the {what} {name!r}: it brings code of its own; read it, and pass "
                "--trust-remote-code to run it"
            ) from error
        reason = " ".join(str(error).split("\n")[0].split())[:200].rstrip(":")
        raise UsageError(
            f"cannot load the {what} {name!r}: {reason or type(error).__name__}; "
            "check the name with `kvmap models` or pass a local folder"
        ) from error
