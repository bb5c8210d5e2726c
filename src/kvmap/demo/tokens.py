"""The world's tokenizer: one word, one id, shared by the three models."""

from __future__ import annotations

from pathlib import Path

from kvmap.demo.words import SPECIAL, vocabulary

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['content'] }}{% if message['role'] == 'assistant' %} .{% endif %}"
    "{% if not loop.last %} {% endif %}"
    "{% endfor %}"
)


def word_ids() -> dict[str, int]:
    """Map each word to its id."""
    return {word: index for index, word in enumerate(vocabulary())}


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer as transformers loads it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(word_ids(), unk_token=SPECIAL[0]))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("unk_token", "pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, model_max_length=32768, clean_up_tokenization_spaces=False, **names
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
