"""Open a checkpoint: weights, tokenizer and the signature that identifies both."""

from __future__ import annotations

from typing import Any

from torch import nn

from kvmap.errors import UsageError
from kvmap.geometry import Geometry, Signature, signature_digest
from kvmap.models.configs import load_config, shape_of, told
from kvmap.models.devices import pick_device, pick_dtype, placement
from kvmap.models.digests import (
    config_digest,
    template_digest,
    tokenizer_digest,
    weight_files,
    weights_digest,
)
from kvmap.models.loaded import LoadedModel
from kvmap.models.probe import probe_rope, refuse_unsupported
from kvmap.names import Checkpoint, resolve


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
    several = placement(place, config, name)
    with told(name):
        model, report = AutoModelForCausalLM.from_pretrained(
            checkpoint.location,
            revision=checkpoint.revision,
            dtype=pick_dtype(dtype, place),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            use_safetensors=True,  # the other format runs code when it is read
            **several,
        )
        if not several:
            model.to(place)
    if missing := sorted(report["missing_keys"]):
        raise UsageError(
            f"cannot load the model {name!r}: its files lack {len(missing)} weights, "
            f"{missing[0]} first; download or save it again"
        )
    tokenizer = load_tokenizer(checkpoint, trust_remote_code)
    return wrap(model.eval(), tokenizer, checkpoint)


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


def identify(name: str, trust_remote_code: bool = False) -> str | None:
    """Return the digest a model's signature will have, without loading its weights.

    None where no weight files are at hand to tell it by.
    """
    checkpoint = resolve(name)
    if not weight_files(checkpoint):
        return None
    config = load_config(checkpoint, trust_remote_code)
    tokenizer = load_tokenizer(checkpoint, trust_remote_code)
    return signature_digest(
        config_digest(config),
        weights_digest(checkpoint),
        tokenizer_digest(tokenizer),
        template_digest(tokenizer),
    )


def load_tokenizer(checkpoint: Checkpoint, trust_remote_code: bool = False) -> Any:
    """Load a checkpoint's tokenizer.

    Raises:
        UsageError: It cannot be loaded.
    """
    from transformers import AutoTokenizer

    with told(checkpoint.name, "tokenizer"):
        return AutoTokenizer.from_pretrained(
            checkpoint.location, revision=checkpoint.revision, trust_remote_code=trust_remote_code
        )


def _revision(model: nn.Module, checkpoint: Checkpoint) -> str | None:
    return (
        None
        if checkpoint.local
        else getattr(model.config, "_commit_hash", None) or checkpoint.revision
    )
