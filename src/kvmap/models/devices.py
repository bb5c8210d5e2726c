"""Where a model is put and in which dtype: one device, several, or a share of each process."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import distributed

from kvmap.errors import UsageError
from kvmap.models.configs import shape_of

# Every layer cut by heads over the processes that `torchrun` has started.
SHARDED = "tensor-parallel"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


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


def placement(place: str, config: Any, name: str) -> dict[str, Any]:
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
