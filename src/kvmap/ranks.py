"""Several processes over one piece of work, as `torchrun` starts them: who they are, their sums.

One process is the ordinary case and needs nothing of torch.distributed. The processes share a
file system.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvmap.moments import Moments


@dataclass(frozen=True)
class Ranks:
    """This process's number among all."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def shards(self, number: int) -> range:
        """Return this process's share of numbered shards."""
        return range(self.rank, number, self.count)

    def agree(self, value: bool) -> bool:
        """Wait for all and return what the first says."""
        if self.count == 1:
            return value
        said = torch.tensor([float(value and self.first)])
        _sum(said)
        return bool(said.item())

    def pool(self, moments: Moments) -> None:
        """Make every process's moments those of the rows of all."""
        if self.count > 1:
            moments.pool(_sum)


@contextmanager
def ranks() -> Iterator[Ranks]:
    """Join the other processes that `torchrun` has started, if any."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Ranks()
        return
    from torch import distributed

    distributed.init_process_group("gloo")
    try:
        yield Ranks(distributed.get_rank(), count)
    finally:
        distributed.destroy_process_group()


def are_several() -> bool:
    """Return whether `torchrun` has started more processes than this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first() -> bool:
    """Return whether this process is the first, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def _sum(tensor: torch.Tensor) -> None:
    """Replace a tensor by its sum over all processes."""
    from torch import distributed

    here = tensor.cpu()
    distributed.all_reduce(here)
    tensor.copy_(here)
