"""Several processes over one piece of work, as `torchrun` starts them: who they are, their sums.

One process is the ordinary case and needs nothing of torch.distributed. The processes share a
file system. Either each has whole models and takes its share of the work, or all share each
model: then all do the same work, and the first keeps what comes of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch

from kvmap.moments import Moments


@dataclass(frozen=True)
class Ranks:
    """This process's number among all, and whether each has a part of every model alone."""

    rank: int = 0
    count: int = 1
    sharded: bool = False

    @property
    def first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    @property
    def keeps(self) -> bool:
        """Whether this process keeps what the models give it."""
        return self.first or not self.sharded

    def shards(self, number: int) -> range:
        """Return this process's share of numbered shards."""
        return range(number) if self.sharded else range(self.rank, number, self.count)

    def agree(self, value: bool) -> bool:
        """Wait for all and return what the first says."""
        if self.count == 1:
            return value
        said = torch.tensor([float(value and self.first)])
        _sum(said)
        return bool(said.item())

    def same(self, value: bool) -> bool:
        """Return what the first says where no process can go on without the others."""
        return self.agree(value) if self.sharded else value

    def pool(self, moments: Moments) -> None:
        """Make every process's moments those of the rows of all."""
        if self.count > 1 and not self.sharded:
            moments.pool(_sum)


ALONE = Ranks()


@contextmanager
def ranks(sharded: bool = False) -> Iterator[Ranks]:
    """Join the other processes that `torchrun` has started, if any.

    Args:
        sharded: They share each model, whose sums go by the fastest way its devices have.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield ALONE
        return
    from torch import distributed

    fast = "cpu:gloo,cuda:nccl" if sharded and torch.cuda.is_available() else "gloo"
    # A process waits while the first reads a large checkpoint or adds up a shard.
    distributed.init_process_group(fast, timeout=timedelta(hours=2))
    try:
        yield Ranks(distributed.get_rank(), count, sharded)
    finally:
        distributed.destroy_process_group()


def is_first() -> bool:
    """Return whether this process is the first, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def _sum(tensor: torch.Tensor) -> None:
    """Replace a tensor by its sum over all processes."""
    from torch import distributed

    here = tensor.cpu()
    distributed.all_reduce(here)
    tensor.copy_(here)
