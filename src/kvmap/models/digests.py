"""What tells models apart: digests of config, tokenizer, chat template and weight files."""

from __future__ import annotations

import hashlib
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvmap.geometry import json_digest
from kvmap.names import Checkpoint

_VOLATILE = (
    "transformers_version",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "architectures",
    "use_cache",
)


def config_digest(config: Any) -> str:
    """Return a digest of what a config says about the computation."""
    data = {key: value for key, value in config.to_dict().items() if key not in _VOLATILE}
    return json_digest(json.loads(json.dumps(data, default=str)))


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of vocabulary, merges, normalisation and special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    data = (
        json.loads(backend.to_str())
        if backend is not None
        else {"vocabulary": tokenizer.get_vocab()}
    )
    data.pop("truncation", None)
    data.pop("padding", None)
    specials = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token]
    return json_digest([data, specials])


def template_digest(tokenizer: Any) -> str:
    """Return a digest of the chat template, empty templates included."""
    return json_digest(tokenizer.chat_template)


def weights_digest(checkpoint: Checkpoint, model: nn.Module | None = None) -> str:
    """Return a digest of a checkpoint's weight files, or of the tensors of a model in memory."""
    files = weight_files(checkpoint)
    if files:
        return json_digest([[file.name, _file_digest(file)] for file in files])
    digest = hashlib.sha256()
    for name, tensor in sorted((model.state_dict() if model else {}).items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def weight_files(checkpoint: Checkpoint) -> list[Path]:
    """Return a checkpoint's weight files in its folder or the hub's cache; none if none are."""
    folder = Path(checkpoint.location)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(
            checkpoint.location, "config.json", revision=checkpoint.revision
        )
        if not isinstance(found, str):
            return []
        folder = Path(found).parent
    return sorted(folder.glob("*.safetensors"))


def _file_digest(path: Path) -> str:
    """Return a file's sha256; the hub's cache names large files by it already."""
    blob = path.resolve().name
    if re.fullmatch(r"[0-9a-f]{64}", blob):
        return blob
    status = path.stat()
    return _hash_file(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1024)
def _hash_file(path: Path, size: int, modified: int) -> str:
    """Hash a file once per process for as long as its size and time stay the same."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
