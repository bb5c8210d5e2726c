"""Tiny random checkpoints, built offline in milliseconds, that the tests read and never write.

Every model has weights large enough for attention to be sharp and for a wrong cache to show in
the logits: transformers' own initialisation leaves attention so flat that a cache of zeros would
pass. All share one byte-level tokenizer, except the two that exist to be told apart by it.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<|turn|>")
TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}: {{ message['content'] }}</s>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)
VOCABULARY = len(SPECIAL_TOKENS) + 256


def byte_tokenizer(reverse: bool = False, template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Build a tokenizer of one token per byte; `reverse` numbers the same bytes backwards."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )


def _rope(kind: str, theta: float, **rest) -> dict:
    return {"rope_type": kind, "rope_theta": theta, **rest}


DEFAULT = _rope("default", 1e4)
LLAMA3 = _rope(
    "llama3",
    5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = _rope("yarn", 1e4, factor=4.0, original_max_position_embeddings=64)

SMALL = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
LARGE = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "hidden_size": 96,
}


def _ministral(theta: float, factor: float, original: int, beta: float, **rest) -> dict:
    rope = _rope(
        "yarn",
        theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=32.0,
        beta_slow=1.0,
    )
    return rope | {"llama_4_scaling_beta": beta, "mscale": 1.0, "mscale_all_dim": 1.0} | rest


# name -> (model type, what differs from COMMON). Everything here can be mapped.
SUPPORTED: dict[str, tuple[str, dict]] = {
    "qwen3_small": ("qwen3", dict(SMALL, rope_parameters=_rope("default", 1e6))),
    "qwen3_large": ("qwen3", dict(LARGE, rope_parameters=_rope("default", 5e5))),
    "llama_default": ("llama", dict(SMALL, rope_parameters=DEFAULT)),
    "llama_llama3": ("llama", dict(LARGE, rope_parameters=LLAMA3)),
    "llama_llama3_other": (
        "llama",
        dict(
            SMALL,
            rope_parameters=_rope(
                "llama3",
                1e4,
                factor=4.0,
                low_freq_factor=2.0,
                high_freq_factor=8.0,
                original_max_position_embeddings=128,
            ),
        ),
    ),
    "llama_yarn": ("llama", dict(SMALL, rope_parameters=YARN)),
    "llama_yarn_other": (
        "llama",
        dict(
            LARGE,
            rope_parameters=_rope(
                "yarn",
                1e5,
                factor=8.0,
                original_max_position_embeddings=128,
                beta_fast=16.0,
                beta_slow=2.0,
                attention_factor=0.7,
                truncate=False,
            ),
        ),
    ),
    "llama_linear": ("llama", dict(SMALL, rope_parameters=_rope("linear", 1e4, factor=2.0))),
    "llama_linear_other": ("llama", dict(SMALL, rope_parameters=_rope("linear", 1e5, factor=8.0))),
    "ministral3": ("ministral3", dict(SMALL, rope_parameters=_ministral(1e6, 16.0, 16, 0.1))),
    "ministral3_other": (
        "ministral3",
        dict(LARGE, rope_parameters=_ministral(1e4, 4.0, 32, 0.3, mscale=2.0, mscale_all_dim=0.5)),
    ),
    "qwen2_bias": ("qwen2", dict(SMALL, rope_parameters=_rope("default", 1e6))),
    "phi3_partial": (
        "phi3",
        dict(
            SMALL,
            rope_parameters=_rope("default", 1e4, partial_rotary_factor=0.5),
            sliding_window=None,
        ),
    ),
    "glm4_interleaved": (
        "glm4",
        dict(SMALL, rope_parameters=_rope("default", 1e4, partial_rotary_factor=0.5)),
    ),
    "cohere_interleaved": (
        "cohere",
        dict(SMALL, rope_parameters=_rope("default", 5e4), logit_scale=1.0),
    ),
    "smollm3_nope": (
        "smollm3",
        dict(LARGE, rope_parameters=_rope("default", 1e4), no_rope_layers=[1, 0, 1, 0]),
    ),
}

# name -> (model type, what differs, a word the refusal must contain).
# Each answers at chance if it is mapped anyway.
REFUSED: dict[str, tuple[str, dict, str]] = {
    "gemma3_sliding": (
        "gemma3_text",
        dict(
            SMALL,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "sliding",
    ),
    "mistral_sliding": (
        "mistral",
        dict(SMALL, sliding_window=8, rope_parameters=DEFAULT),
        "sliding",
    ),
    "deepseek_mla": (
        "deepseek_v3",
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 2,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        "MLA",
    ),
    "qwen3_next_linear": (
        "qwen3_next",
        dict(
            SMALL,
            layer_types=["linear_attention", "linear_attention", "full_attention"],
            linear_num_value_heads=2,
            linear_num_key_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        "linear",
    ),
    "llama_dynamic": (
        "llama",
        dict(SMALL, rope_parameters=_rope("dynamic", 1e4, factor=2.0)),
        "dynamic",
    ),
    "llama_longrope": (
        "llama",
        dict(
            SMALL,
            rope_parameters=_rope(
                "longrope",
                1e4,
                factor=4.0,
                original_max_position_embeddings=64,
                short_factor=[1.0] * 8,
                long_factor=[1.0 + i / 2 for i in range(8)],
            ),
        ),
        "longrope",
    ),
    "gemma3n_shared": (
        "gemma3n_text",
        dict(
            SMALL,
            num_kv_shared_layers=1,
            layer_types=["full_attention"] * 3,
            sliding_window=8,
            vocab_size_per_layer_input=VOCABULARY,
            hidden_size_per_layer_input=8,
            altup_num_inputs=2,
            laurel_rank=4,
            activation_sparsity_pattern=[0.0] * 3,
        ),
        "share",
    ),
}

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "use_cache": True,
}


def random_model(model_type: str, seed: int, **options) -> PreTrainedModel:
    """Build a model whose weights have unit gain and whose norm weights differ from one."""
    config = AutoConfig.for_model(model_type, **(COMMON | options))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed)
    return model


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Draw every parameter anew: matrices by fan-in, biases small, norm weights around one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                gain = 1.5 if "q_proj" in name else 1.0
                parameter.copy_(
                    noise * (gain if "embed" in name else gain / parameter.shape[-1] ** 0.5)
                )
            elif name.endswith("bias"):
                parameter.copy_(noise)
            else:
                parameter.copy_(parameter + 0.2 * noise)


def save(
    model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None
) -> Path:
    """Write model and tokenizer as a checkpoint folder."""
    model.generation_config.eos_token_id = (
        None  # a random model would stop anywhere; every test wants all its tokens
    )
    model.save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return folder


def _named(name: str) -> Callable[[Path], Path]:
    model_type, options = (SUPPORTED.get(name) or REFUSED[name])[:2]
    seed = 100 + [*SUPPORTED, *REFUSED].index(name)
    return lambda folder: save(random_model(model_type, seed, **options), folder)


def _like_llama(tokenizer: Callable[[], PreTrainedTokenizerFast]) -> Callable[[Path], Path]:
    model_type, options = SUPPORTED["llama_default"]
    return lambda folder: save(random_model(model_type, 7, **options), folder, tokenizer())


BUILDERS: dict[str, Callable[[Path], Path]] = {
    **{name: _named(name) for name in (*SUPPORTED, *REFUSED)},
    "other_tokenizer": _like_llama(lambda: byte_tokenizer(reverse=True)),
    "other_template": _like_llama(
        lambda: byte_tokenizer(template=TEMPLATE.replace("turn", "chat"))
    ),
}
