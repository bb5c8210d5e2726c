"""The target's lowest layers alone: what a map reads of it, where the rest is elsewhere.

A map reads keys and values of the target's layer 0, or of its lowest `count` layers, which come
of the tokens by the embedding, the layers below the last of them and, of that one, what stands
before its attention. Those weights make a file of kind "lowest", with the buffers that the model
computes from its config, that config, and the signature of the whole model. Of Qwen3-14B, one
layer takes 1.6 GB of 30, nearly all of it the embedding.

A model made of the file has its whole shape; what the file lacks lies on torch's meta device,
where it takes no memory.
"""

from __future__ import annotations

import json
import operator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvmap import artifacts, header
from kvmap.errors import UsageError
from kvmap.geometry import Signature
from kvmap.models.configs import shape_of
from kvmap.models.devices import pick_device, pick_dtype
from kvmap.models.digests import config_digest
from kvmap.models.loaded import LoadedModel
from kvmap.models.run import lowest_layers

KIND = "lowest"


def save_lowest(target: LoadedModel, count: int, path: Path | str) -> Path:
    """Write what the lowest `count` layers' keys and values are made of, in the model's dtype.

    Raises:
        UsageError: The model has no such layers, or not in memory.
    """
    layers = target.signature.geometry.layers
    if not 1 <= count <= layers:
        raise UsageError(
            f"found {count} lowest layers of {target.signature.name} to keep, expected 1 to "
            f"{layers}; a map that reads none is applied without the target"
        )
    config = json.loads(target.model.config.to_json_string(use_diff=False))
    with suppress(Exception):  # whatever a checkpoint's own code does to its config
        same = False
        _, same = _config(config, target.signature)
    if not same:
        raise UsageError(
            f"{target.signature.name}: its config takes code of its own, which a file of its "
            "lowest layers would lack; map with the whole target"
        )
    try:
        read = _read_in_pass(target, count)
    except _Absent as error:
        raise UsageError(
            f"{target.signature.name}: the weights of {error} are not in memory; "
            "load it with --device cpu"
        ) from error
    metadata = {"model": target.signature.to_json(), "layers": count, "config": config}
    return artifacts.write(path, KIND, read, metadata)


def load_lowest(
    path: Path | str,
    device: str = "auto",
    dtype: str = "auto",
    expected: Signature | None = None,
) -> LoadedModel:
    """Read lowest layers as a model without tokenizer, of the whole model's signature.

    Args:
        device: As `load` takes it; nothing is spread.
        expected: Of the map's target.

    Raises:
        UsageError: The file is no sound artifact of this kind, or of another model.
    """
    artifact = artifacts.open_artifact(path, KIND)
    place = pick_device("auto" if device == "spread" else device)
    with header.sound(path, KIND):
        signature = Signature.from_json(artifact.metadata["model"])
        count = operator.index(artifact.metadata["layers"])
        if expected is not None:
            said, remedy = f"{path}: the map's target", "run `kvmap lowest` on this map"
            expected.require_same(signature, said, remedy)
        model = _shell(path, dict(artifact.metadata["config"]), signature, pick_dtype(dtype, place))
    _fill(model, artifact, place)
    loaded = LoadedModel(model, None, signature, count)
    try:
        _read_in_pass(loaded, count)
    except _Absent as error:
        raise header.unusable(path, f"lacks the weights of {error}", KIND) from error
    except Exception as error:  # whatever somebody's weights break
        problem = f"its layers cannot be run ({type(error).__name__})"
        raise header.unusable(path, problem, KIND) from error
    return loaded


class _Absent(Exception):
    """Names a module whose weights lie on the meta device, where some products still run."""


def _read_in_pass(target: LoadedModel, count: int) -> dict[str, Tensor]:
    """Return the weights and buffers that a pass to the last layer's attention reads, by name.

    Modules that ended have all of theirs read, or might have: experts are chosen by token. Of
    those that the pass stopped in only their own are, not those of modules inside.

    Raises:
        _Absent: One is not there.
    """
    modules = dict(target.model.named_modules())
    begun: set[str] = set()
    ended: set[str] = set()

    def begin(module: nn.Module, _: Any, name: str) -> None:
        if any(tensor.is_meta for tensor in _held(module, False).values()):
            raise _Absent(name)
        begun.add(name)

    hooks = []
    for name, module in modules.items():
        hooks += [
            module.register_forward_pre_hook(partial(begin, name=name)),
            module.register_forward_hook(lambda *_, name=name: ended.add(name)),
        ]
    token = torch.zeros(1, 1, dtype=torch.long)
    try:
        lowest_layers(target, token, token, count)
    finally:
        for hook in hooks:
            hook.remove()
    return {
        f"{name}.{leaf}".lstrip("."): tensor
        for name in begun
        for leaf, tensor in _held(modules[name], name in ended).items()
    }


def _held(module: nn.Module, inside: bool) -> dict[str, Tensor]:
    """Return a module's own weights and buffers, and those of modules inside it."""
    return dict(module.named_parameters(recurse=inside)) | dict(
        module.named_buffers(recurse=inside)
    )


def _shell(path: Path | str, fields: Any, signature: Signature, dtype: torch.dtype) -> nn.Module:
    """Return the model that a config describes, without weights."""
    from transformers import AutoModelForCausalLM

    try:
        config, same = _config(fields, signature)
        if same:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    config, dtype=dtype, trust_remote_code=False
                )
    except Exception as error:  # whatever somebody's config breaks
        problem = f"its config makes no model here ({type(error).__name__})"
        raise header.unusable(path, problem, KIND) from error
    if not same:
        raise header.unusable(path, "its config is not that of its model", KIND)
    return model.requires_grad_(False).eval()


def _config(fields: dict[str, Any], signature: Signature) -> tuple[Any, bool]:
    """Return the config that fields describe, and whether it is that of the signature's model."""
    from transformers import AutoConfig

    # How a model computes is for those who run it to say, and one way loads code from the hub.
    own = {k: v for k, v in fields.items() if k != "dtype" and not k.endswith("_implementation")}
    config = AutoConfig.for_model(**own)
    shape = shape_of(config.get_text_config(decoder=True))
    digest = config_digest(config.get_text_config(decoder=True))
    same = shape == replace(signature.geometry, rope=()) and digest == signature.config_digest
    return config, same


def _fill(model: nn.Module, artifact: artifacts.Artifact, device: str) -> None:
    """Put a file's weights in their places, in the model's dtype; buffers keep their own."""
    weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name in artifact.names():
        held = weights.get(name, buffers.get(name))
        tensor = artifact.tensor(name)
        kind = None if held is None else (held.shape, held.is_floating_point())
        if kind != (tensor.shape, tensor.is_floating_point()):
            problem = f"{name!r} is no weight of its model, or of another shape or type"
            raise header.unusable(artifact.path, problem, KIND)
        tensor = tensor.to(device)
        if name in weights:
            tensor = nn.Parameter(tensor.to(held.dtype), requires_grad=False)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, tensor)
