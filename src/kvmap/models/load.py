"""Open a checkpoint: weights, tokenizer and the signature that identifies both."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from kvmap.errors import UsageError
from kvmap.geometry import Geometry, Signature, json_digest, signature_digest
from kvmap.models.names import KNOWN, Checkpoint, resolve
from kvmap.models.probe import probe_rope, refuse_unsupported

# Every layer cut by heads over the processes that `torchrun` has started.
SHARDED = "tensor-parallel"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to run, its tokenizer and its signature.

    `lowest` is how many of its lowest layers are there, None where all are.
    """

    model: nn.Module
    tokenizer: Any
    signature: Signature
    lowest: int | None = None

    @property
    def device(self) -> torch.device:
        """Device of the model's input embedding."""
        return self.model.get_input_embeddings().weight.device

    @property
    def places(self) -> tuple[torch.device, ...]:
        """Device of each layer's cache; several where the model is spread over devices."""
        if not hasattr(self.model, "hf_device_map"):
            return (self.device,) * self.signature.geometry.layers
        return tuple(map(_runs_on, self.model.get_decoder().layers))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's weights, and so of its cache."""
        return self.model.dtype

    def all_heads(self, own: Tensor) -> Tensor:
        """Return all KV heads [B, H, T, D] of what holds this process's own.

        All processes that share the model call it together; a whole tensor is returned as it is.
        """
        if own.shape[1] == self.signature.geometry.kv_heads:
            return own
        own = own.contiguous()
        parts = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(parts, own)
        return torch.cat(parts, dim=1)

    def require_layers(self, count: int | None = None) -> None:
        """Check that so many of the lowest layers are there; all and the head if not given.

        Raises:
            UsageError: They are not.
        """
        if self.lowest is not None and (count is None or count > self.lowest):
            remedy = "load the whole model" if count is None else "make them with this map"
            raise UsageError(
                f"{self.signature.name}: found the lowest {self.lowest} of its layers alone, "
                f"expected {count or 'all'}; {remedy}"
            )

    def require_tokens(self, token_ids: Tensor) -> None:
        """Check that token ids are of the model's vocabulary.

        Raises:
            UsageError: One is not, or they are no int64 or int32.
        """
        name, size = self.signature.name, self.signature.geometry.vocabulary
        if token_ids.dtype not in (torch.int64, torch.int32):
            raise UsageError(f"{name}: found token ids of {token_ids.dtype}, expected int64")
        for bound in token_ids.aminmax() if token_ids.numel() else ():
            if not 0 <= (found := int(bound)) < size:
                raise UsageError(
                    f"{name}: found token id {found}, expected 0 to {size - 1}; take tokens of "
                    "this model's tokenizer"
                )


def _runs_on(layer: nn.Module) -> torch.device:
    """Return where a layer runs; weights that are offloaded lie elsewhere until then."""
    placed = getattr(getattr(layer, "_hf_hook", None), "execution_device", None)
    return next(layer.parameters()).device if placed is None else torch.device(placed)


def pick_device(device: str = "auto") -> str:
    """Return a device's name; "auto" is an accelerator where there is one.

    Raises:
        UsageError: No such device here, or no processes to share a model.
    """
    if device == SHARDED and not (distributed.is_available() and distributed.is_initialized()):
        raise UsageError(
            f"found --device {SHARDED}, expected it only where several processes collect; run "
            "`torchrun --nproc-per-node N -m kvmap collect SOURCE TARGET`, or take --device spread"
        )
    if device not in ("auto", "spread", SHARDED):
        return _present(device)
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _present(device: str) -> str:
    try:
        found = torch.device(device)
        module = getattr(torch, found.type, None)
        here = (found.index or 0) < getattr(module, "device_count", lambda: 0)()
    except RuntimeError:
        here = False
    if not here:
        raise UsageError(
            f"no device {device!r} here; expected auto, cpu, spread, or an accelerator that torch "
            "finds, such as cuda or cuda:1"
        )
    return device


def pick_dtype(dtype: str, device: str) -> torch.dtype:
    """Return a torch dtype; "auto" is bfloat16 on an accelerator and float32 on a CPU.

    Raises:
        UsageError: No such dtype.
    """
    if dtype == "auto":
        here = pick_device() if device in ("spread", SHARDED) else device
        return torch.float32 if here.startswith("cpu") else torch.bfloat16
    if dtype not in DTYPES:
        raise UsageError(f"no dtype {dtype!r}; expected auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def load(
    name: str, device: str = "auto", dtype: str = "auto", trust_remote_code: bool = False
) -> LoadedModel:
    """Load a model by any name `resolve` takes and check its RoPE against itself.

    Raises:
        UsageError: Not found, not loadable, or of a kind whose cache cannot be mapped.
    """
    from transformers import AutoModelForCausalLM

    checkpoint = resolve(name)
    place = pick_device(device)
    config = load_config(checkpoint, trust_remote_code)
    refuse_unsupported(config, name)
    placement = _placement(place, config, name)
    with _told(name):
        model, report = AutoModelForCausalLM.from_pretrained(
            checkpoint.location,
            revision=checkpoint.revision,
            dtype=pick_dtype(dtype, place),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            use_safetensors=True,  # the other format runs code when it is read
            **placement,
        )
        if not placement:
            model.to(place)
    if missing := sorted(report["missing_keys"]):
        raise UsageError(
            f"cannot load the model {name!r}: its files lack {len(missing)} weights, "
            f"{missing[0]} first; download or save it again"
        )
    tokenizer = load_tokenizer(checkpoint, trust_remote_code)
    return wrap(model.eval(), tokenizer, checkpoint)


def _placement(place: str, config: Any, name: str) -> dict[str, Any]:
    """Return what has transformers lay a model over several devices; nothing for one device.

    Raises:
        UsageError: It cannot be cut for as many processes as there are, or accelerate is missing.
    """
    if place not in ("spread", SHARDED):
        return {}
    if find_spec("accelerate") is None:
        raise UsageError(
            f"--device {place} needs accelerate, which is not installed; "
            "run `pip install 'kvmap[devices]'`"
        )
    if place == "spread":
        return {"device_map": "auto"}
    from transformers.distributed import DistributedConfig

    if not getattr(config, "base_model_tp_plan", None):
        raise UsageError(
            f"{name}: found no tensor-parallel plan for {config.model_type} in transformers, "
            f"expected one for --device {SHARDED}; take --device spread"
        )
    count, heads = distributed.get_world_size(), shape_of(config).kv_heads
    if heads % count:
        raise UsageError(
            f"{name}: found {heads} KV heads for {count} processes, expected as many for each; "
            f"start a number of processes that divides {heads}"
        )
    return {"distributed_config": DistributedConfig(tp_size=count)}


def wrap(model: nn.Module, tokenizer: Any, checkpoint: Checkpoint) -> LoadedModel:
    """Make a LoadedModel of a model in memory; its RoPE is probed.

    Raises:
        UsageError: The probe finds keys that kvmap cannot strip.
    """
    model.requires_grad_(False)
    config = model.config.get_text_config(decoder=True)
    shape = shape_of(config)
    geometry = Geometry(**{**shape.__dict__, "rope": probe_rope(model, checkpoint.name)})
    signature = Signature(
        name=checkpoint.name,
        revision=_revision(model, checkpoint),
        config_digest=config_digest(config),
        weights_digest=weights_digest(checkpoint, model),
        tokenizer_digest=tokenizer_digest(tokenizer),
        template_digest=template_digest(tokenizer),
        dtype=str(model.dtype).removeprefix("torch."),
        geometry=geometry,
    )
    return LoadedModel(model, tokenizer, signature)


def load_config(checkpoint: Checkpoint, trust_remote_code: bool = False) -> Any:
    """Read a checkpoint's config; known names answer from the built-in table when offline.

    Raises:
        UsageError: No config can be read.
    """
    from transformers import AutoConfig

    try:
        with _told(checkpoint.name):
            config = AutoConfig.from_pretrained(
                checkpoint.location,
                revision=checkpoint.revision,
                trust_remote_code=trust_remote_code,
            )
    except UsageError:
        config = published_config(checkpoint.name)
        if config is None:
            raise
    return config.get_text_config(decoder=True)


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

    with _told(config.name_or_path or config.model_type), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)


def identify(name: str, trust_remote_code: bool = False) -> str | None:
    """Return the digest a model's signature will have, without loading its weights.

    None where no weight files are at hand to tell it by.
    """
    checkpoint = resolve(name)
    if not _weight_files(checkpoint):
        return None
    config = load_config(checkpoint, trust_remote_code)
    tokenizer = load_tokenizer(checkpoint, trust_remote_code)
    return signature_digest(
        config_digest(config),
        weights_digest(checkpoint),
        tokenizer_digest(tokenizer),
        template_digest(tokenizer),
    )


def published_config(name: str) -> Any | None:
    """Return the config of a known name from the built-in table, None where there is none."""
    from transformers import AutoConfig

    _, shape = KNOWN.get(name.partition("@")[0].lower(), (None, None))
    if shape is None:
        return None
    return AutoConfig.for_model(**json.loads(json.dumps(shape)))


def load_tokenizer(checkpoint: Checkpoint, trust_remote_code: bool = False) -> Any:
    """Load a checkpoint's tokenizer.

    Raises:
        UsageError: It cannot be loaded.
    """
    from transformers import AutoTokenizer

    with _told(checkpoint.name, "tokenizer"):
        return AutoTokenizer.from_pretrained(
            checkpoint.location, revision=checkpoint.revision, trust_remote_code=trust_remote_code
        )


def shape_of(config: Any) -> Geometry:
    """Return the cache geometry a config states, without RoPE tables.

    Raises:
        UsageError: It states none.
    """
    with _told(config.name_or_path or config.model_type):
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
    files = _weight_files(checkpoint)
    if files:
        return json_digest([[file.name, _file_digest(file)] for file in files])
    digest = hashlib.sha256()
    for name, tensor in sorted((model.state_dict() if model else {}).items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _weight_files(checkpoint: Checkpoint) -> list[Path]:
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


def _revision(model: nn.Module, checkpoint: Checkpoint) -> str | None:
    return (
        None
        if checkpoint.local
        else getattr(model.config, "_commit_hash", None) or checkpoint.revision
    )


@contextmanager
def _told(name: str, what: str = "model") -> Iterator[None]:
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
