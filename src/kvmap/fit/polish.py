"""Polish a map through the frozen target: Adam on its own weights, loss KL(native ‖ mapped).

What a least-squares fit gets wrong evenly, the target minds unevenly; a few hundred steps move
the error to where nothing reads. Each step draws sequences and a cut from (seed, step) alone,
so that an interrupted run goes on exactly where its checkpoint stands. The held-out divergence
decides when to stop and which weights are kept; the starting map is kept where none beats it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmap import artifacts, header
from kvmap.errors import UsageError
from kvmap.fit.continuation import Lesson, Readings, lesson, loss
from kvmap.fit.coordinates import Coordinates
from kvmap.geometry import json_digest
from kvmap.map_options import MapOptions
from kvmap.mapping import CacheMap
from kvmap.models import LoadedModel

Models = tuple[LoadedModel, LoadedModel]
# A cut leaves at least this share of a sequence as context.
LEAST_CONTEXT = 0.25
# What a checkpoint keeps of each leaf: the weights, those that were best, and Adam's moments.
WEIGHTS = ("leaf", "best")
ADAM = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class PolishOptions:
    """How to polish.

    Attributes:
        steps: At most.
        rate: Of Adam, relative to the sizes in `kvmap.fit.coordinates`; rises over the first
            sixteenth of the steps, then falls to a tenth along a cosine.
        batch: Sequences per step.
        continuation: Tokens read on after the cut; at most a quarter of a sequence.
        every: Steps between looks at the held-out divergence.
        patience: Looks without gain before stopping.
        reconstruction: ρ, weight of the relative error of the cache itself.
        held_out: Held-out sequences looked at, at most.
        seed: Of sequences and cuts.
    """

    steps: int = 256
    rate: float = 2e-3
    batch: int = 8
    continuation: int = 64
    every: int = 32
    patience: int = 3
    reconstruction: float = 0.1
    held_out: int = 16
    seed: int = 0


@dataclass(frozen=True)
class Polished:
    """The best map found and the held-out divergence, nats per token, by step."""

    cmap: CacheMap
    history: dict[int, float]


Progress = Callable[[str, int, int], None]


def polish(
    cmap: CacheMap,
    models: Models,
    sequences: tuple[Tensor, Tensor],
    coordinates: Coordinates,
    options: PolishOptions,
    checkpoint: Path | None = None,
    progress: Progress = lambda step, done, total: None,
) -> Polished:
    """Return the map with its weights moved to where the target speaks as it would natively.

    Args:
        models: Source and target.
        sequences: Train and held-out token ids, [N, T] each.
        coordinates: In which to step; on the target's device.
        checkpoint: File to resume from and to write to; removed at the end.
    """
    train, held_out = sequences
    options = replace(options, continuation=min(options.continuation, train.shape[1] // 4))
    start = cmap.to(models[1].device, torch.float32)
    run = _Run(start, coordinates, options, json_digest(_key(cmap, options)))
    run.resume(checkpoint)
    unseen = _unseen(cmap, models, held_out, options)
    readings = Readings(models, train)
    if not run.history:
        run.look(models[1], unseen)
    while run.step < options.steps and not run.stale():
        chosen, stop = _draw(train, run.step, options)
        ends = native_ends(cmap.options, stop - options.continuation)
        given = readings.lesson(chosen, stop, options.continuation, *ends)
        run.advance(given, models[1])
        if run.step % options.every == 0 or run.step == options.steps:
            run.look(models[1], unseen)
            run.save(checkpoint)
        progress("polish", run.step, options.steps)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    made = {"options": asdict(options), "held_out_kl": {str(k): v for k, v in run.history.items()}}
    best = run.cmap(run.best) if min(run.history, key=run.history.get) else cmap
    best = replace(best.to("cpu"), provenance=cmap.provenance | {"polish": made})
    return Polished(best, run.history)


def _key(cmap: CacheMap, options: PolishOptions) -> list[Any]:
    return [cmap.source.digest, cmap.target.digest, cmap.provenance, asdict(options)]


def _draw(train: Tensor, step: int, options: PolishOptions) -> tuple[Tensor, int]:
    """Return the numbers [B] of a step's sequences and where they are cut off."""
    generator = torch.Generator().manual_seed((options.seed << 32) + step)
    chosen = torch.randint(len(train), (options.batch,), generator=generator)
    least = max(int(train.shape[1] * LEAST_CONTEXT), 2) + options.continuation
    stop = torch.randint(min(least, train.shape[1]), train.shape[1] + 1, (), generator=generator)
    return chosen, int(stop)


def _unseen(
    cmap: CacheMap, models: Models, held_out: Tensor, options: PolishOptions
) -> list[Lesson]:
    """Return held-out lessons, half of them at half the length."""
    kept = held_out[: options.held_out]
    halves = kept[0::2], kept[1::2, : max(kept.shape[1] // 2, options.continuation + 3)]
    after = options.continuation
    return [
        lesson(models, half, after, *native_ends(cmap.options, half.shape[1] - after))
        for half in halves
        if len(half)
    ]


def native_ends(options: MapOptions, context: int) -> tuple[int, int]:
    """Return the native head and tail of a lesson's context of so many tokens, as they are in use.

    A tail is at most half of its context, so that short ones are mapped as well.
    """
    return options.native_head, min(options.tail_length(context), context // 2)


@dataclass(eq=False)
class _Run:
    """The state of a polish: weights, Adam's moments, the best weights so far."""

    start: CacheMap
    coordinates: Coordinates
    options: PolishOptions
    key: str
    step: int = 0
    history: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found = self.coordinates.leaves(self.start)
        self.names = list(found)
        self.leaves = [leaf.detach().clone().requires_grad_() for leaf, _ in found.values()]
        groups = [
            {"params": [leaf], "size": size}
            for leaf, (_, size) in zip(self.leaves, found.values(), strict=True)
        ]
        self.optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99))
        self.best = [leaf.detach().clone() for leaf in self.leaves]

    def cmap(self, leaves: list[Tensor]) -> CacheMap:
        """Return the map that these leaves stand for."""
        return self.coordinates.cmap(self.start, dict(zip(self.names, leaves, strict=True)))

    def advance(self, given: Lesson, target: LoadedModel) -> None:
        """Take one step."""
        rate = self.options.rate * _schedule(self.step, self.options.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["size"]
        self.optimizer.zero_grad()
        total, _ = loss(self.cmap(self.leaves), target, given, self.options.reconstruction)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.leaves, 1.0)
        self.optimizer.step()
        self.step += 1

    @torch.no_grad()
    def look(self, target: LoadedModel, unseen: list[Lesson]) -> None:
        """Note the held-out divergence and keep the weights if they are the best."""
        current = self.cmap(self.leaves)
        divergences = [float(loss(current, target, given)[1]) for given in unseen]
        found = sum(divergences) / len(divergences)
        if found < min(self.history.values(), default=float("inf")):
            for best, leaf in zip(self.best, self.leaves, strict=True):
                best.copy_(leaf)
        self.history[self.step] = found

    def stale(self) -> bool:
        """Whether the last looks brought nothing."""
        best = min(self.history, key=self.history.get)
        return self.step - best >= self.options.patience * self.options.every

    def save(self, path: Path | None) -> None:
        """Write the state."""
        if path is None:
            return
        tensors = {}
        for at, (leaf, best) in enumerate(zip(self.leaves, self.best, strict=True)):
            state = self.optimizer.state[leaf]
            tensors |= {f"{at}.leaf": leaf, f"{at}.best": best}
            tensors |= {f"{at}.{name}": state[name] for name in ADAM}
        history = {str(step): value for step, value in self.history.items()}
        record = {"key": self.key, "step": self.step, "history": history}
        artifacts.write(path, "polish", tensors, record)

    def resume(self, path: Path | None) -> None:
        """Take up the state of an interrupted run of the same map and options.

        One that is not sound is left for the next save to replace.
        """
        if path is None or not path.exists():
            return
        with suppress(UsageError):
            artifact = artifacts.open_artifact(path, "polish")
            if artifact.metadata.get("key") == self.key:
                self._take_up(artifact)

    def _take_up(self, artifact: artifacts.Artifact) -> None:
        """Become the run that a checkpoint is of, or change nothing.

        Raises:
            UsageError: The checkpoint is not sound.
        """
        with header.sound(artifact.path, "polish"):
            step = operator.index(artifact.metadata["step"])
            history = {int(k): float(v) for k, v in artifact.metadata["history"].items()}
            if not history or not 0 <= max(history) <= step <= self.options.steps:
                raise ValueError(f"step {step} of {self.options.steps}")
        states = [
            {name: self._read(artifact, at, name) for name in (*WEIGHTS, *ADAM)}
            for at in range(len(self.leaves))
        ]
        self.step, self.history = step, history
        for at, (leaf, state) in enumerate(zip(self.leaves, states, strict=True)):
            leaf.data.copy_(state["leaf"])
            self.best[at] = state["best"]
            moments = {name: state[name] for name in ADAM}
            self.optimizer.state[leaf] = {"step": torch.tensor(float(step)), **moments}

    def _read(self, artifact: artifacts.Artifact, at: int, name: str) -> Tensor:
        """Return a leaf's weights or moments, on its device.

        Raises:
            UsageError: They are not of the leaf's shape, or not there.
        """
        found, leaf = artifact.tensor(f"{at}.{name}"), self.leaves[at]
        if (found.shape, found.dtype) != (leaf.shape, leaf.dtype):
            raise header.unusable(artifact.path, f"'{at}.{name}' is of another map", "polish")
        return found.to(leaf.device)


def _schedule(step: int, steps: int) -> float:
    rising = min(1.0, 16 * (step + 1) / steps)
    return rising * (0.55 + 0.45 * math.cos(math.pi * step / steps))
