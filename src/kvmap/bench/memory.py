"""The most memory that tensors took while something ran, beside what was there before."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Run something and return the peak of bytes held by tensors made meanwhile.

    On CUDA the allocator counts; elsewhere every new storage is counted from the operation
    that returns it until it is freed, so scratch space inside an operation is not seen.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _Counter() as counter:
        run()
    return counter.peak


class _Counter(TorchDispatchMode):
    """Counts the bytes of live storages that operations have returned."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.held = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id(leaf.untyped_storage()) for leaf in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in self.live and id(storage) not in given:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        self.live[key] = storage.nbytes()
        self.held += self.live[key]
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.held -= self.live.pop(key, 0)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
