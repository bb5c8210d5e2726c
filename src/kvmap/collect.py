"""Run both models over the same tokens; keep content-space caches and their moments.

Every shard of sequences goes through three steps: the source's rows to a file, the target's
rows to a file, both into the moments. A step whose file is there and sound is not done again, so
an interrupted run goes on where it stopped and ends with the same bytes. The folder's index is
written last: without it there is no calibration.
"""

from __future__ import annotations

import gc
import operator
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmap import artifacts, atomic, header
from kvmap.calibration import Calibration
from kvmap.calibration_files import (
    INDEX,
    MOMENTS,
    RUN,
    SPLITS,
    TOKENS,
    empty_moments,
    load_moments,
    load_rows,
    load_side,
    save_moments,
    write_index,
)
from kvmap.clearing import clear, read_run, require_unfinished
from kvmap.collect_options import CollectOptions, check_options, held_out_mask
from kvmap.columns import LOOKBACK
from kvmap.content import content_rows, row_width
from kvmap.errors import UsageError
from kvmap.geometry import json_digest, pairing_problems
from kvmap.models import LoadedModel
from kvmap.moments import Rows
from kvmap.ranks import ALONE, Ranks

PARTIAL = "moments.partial.safetensors"
# Without a dump, moments are saved this often, so that an interrupted run loses little.
SAVE_SECONDS = 30.0


Opener = Callable[[], LoadedModel]
Progress = Callable[[str, int, int], None]


def collect(
    openers: tuple[Opener, Opener],
    token_ids: Tensor,
    out: Path,
    options: CollectOptions,
    text: dict[str, Any],
    progress: Progress = lambda step, done, total: None,
    together: bool = True,
    force: bool | None = False,
    team: Ranks = ALONE,
) -> Calibration:
    """Fill a calibration folder and return it.

    Args:
        openers: Load the source and the target; each is called at most once.
        token_ids: [N, T], the same for both.
        text: Where the tokens came from, for the record.
        progress: Told a step's name, shards done and shards in all.
        together: Keep both models in memory; otherwise one after the other, which keeps
            all rows on disk until the end.
        force: Remove the calibration or interrupted run in the folder, once all else is known
            to be in order; None removes one that cannot be gone on with.
        team: Of several processes each takes its share of the shards, and the moments are those
            of all; where they share each model, all run all shards and the first keeps the rows.

    Raises:
        UsageError: The models cannot be paired, or the folder holds another run.
    """
    check_options(options, *token_ids.shape)
    together = team.same(together)  # each process has measured its free memory itself
    models = _Models(openers, together)
    options = replace(options, lookback_layers=options.late_layers(models.source.geometry))
    run = _Run(models, token_ids, out, options, text, team)
    if run.start(force):
        return run.tidy()
    steps = {"source": run.source_rows, "target": run.target_rows, "moments": run.add_moments}
    passes = [steps] if together else [{name: step} for name, step in steps.items()]
    for stage in passes:
        for shard in team.shards(run.shards):
            for step in stage.values():
                step(shard)
            progress(" + ".join(stage), shard + 1, run.shards)
    return run.finish()


class _Models:
    """Both models, opened when needed; only one at a time where both do not fit."""

    def __init__(self, openers: tuple[Opener, Opener], together: bool) -> None:
        self.openers = openers
        self.together = together
        self.loaded: dict[int, LoadedModel] = {}
        # The target first: where only one fits, the source is then left open for its pass.
        signatures = {side: self.open(side).signature for side in (1, 0)}
        self.source, self.target = signatures[0], signatures[1]
        problems = pairing_problems(self.source, self.target)
        if problems:
            raise UsageError(
                f"{self.source.name} and {self.target.name} cannot be paired: {'; '.join(problems)}"
            )

    def open(self, side: int) -> LoadedModel:
        """Return the source (0) or the target (1)."""
        if side not in self.loaded:
            if not self.together:
                self.loaded.clear()
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            self.loaded[side] = self.openers[side]()
        return self.loaded[side]


class _Run:
    """One collection: its folder, its models, its state."""

    def __init__(
        self,
        models: _Models,
        token_ids: Tensor,
        out: Path,
        options: CollectOptions,
        text: dict[str, Any],
        team: Ranks,
    ) -> None:
        self.models = models
        self.team = team
        self.partial = f"{team.rank}.{PARTIAL}" if team.count > 1 else PARTIAL
        self.token_ids = token_ids
        self.out = out
        self.options = options
        self.text = text
        self.shards = -(-token_ids.shape[0] // options.shard)
        self.held_out = held_out_mask(token_ids.shape[0], options.held_out)
        self.added = 0  # shards in the moments
        self.saved_at = time.monotonic()

    def start(self, force: bool | None = False) -> bool:
        """Write down what this run is, or check that an interrupted one was the same.

        Returns:
            Whether that one had all but tidied up.

        Raises:
            UsageError: The folder holds something else.
        """
        finished = self.team.agree(self.team.first and self._begin(force))
        if not finished:
            self._start_moments()
        return finished

    def _begin(self, force: bool | None) -> bool:
        if force:
            clear(self.out)
        record = artifacts.without_nan(self._record())
        try:
            self._check_folder(record)
        except UsageError:
            if force is not None:
                raise
            clear(self.out)
        if (self.out / INDEX).exists():
            return True
        atomic.make_folder(self.out)
        artifacts.write_json(self.out / RUN, record, private=True)
        tensors = {"token_ids": self.token_ids.int(), "held_out": self.held_out}
        artifacts.write(self.out / TOKENS, "tokens", tensors, {"text": self.text}, private=True)
        return False

    def _check_folder(self, record: dict[str, Any]) -> None:
        """Check that the folder holds nothing, or an interrupted run of the same record.

        Raises:
            UsageError: It holds something else.
        """
        require_unfinished(self.out)
        found = read_run(self.out)
        if found not in (None, record):
            raise UsageError(
                f"{self.out}: holds an interrupted run with other models, text or options; "
                "pass --force to start anew, or the same options to resume it"
            )

    def _record(self) -> dict[str, Any]:
        models = [self.models.source.digest, self.models.target.digest]
        dtypes = [self.models.source.dtype, self.models.target.dtype]
        tokens = json_digest(self.token_ids.tolist())
        return {
            "kind": "run",
            "options": asdict(self.options),
            "text": self.text,
            "tokens": tokens,
            "models": models,
            "dtypes": dtypes,
            **({"ranks": self.team.count} if self.team.count > 1 else {}),
            **({"sharded": True} if self.team.sharded else {}),
        }

    def _start_moments(self) -> None:
        geometries = (self.models.source.geometry, self.models.target.geometry)
        products = getattr(torch, self.options.products)
        scope = self.options.scope
        kept = SPLITS if self.options.moments and self.team.keeps else ()
        self.moments = {split: empty_moments(*geometries, scope, products) for split in kept}
        if (self.out / self.partial).exists():
            with suppress(UsageError):  # damaged: made anew
                self._take_up()

    def _take_up(self) -> None:
        """Go on with the moments of an interrupted run.

        Raises:
            UsageError: They are not sound.
        """
        path = self.out / self.partial
        pair = (self.models.source, self.models.target)
        moments, metadata = load_moments(path, pair, self.options.scope)
        with header.sound(path, "moments"):
            added = operator.index(metadata["shards"])
            if not 0 <= added <= self.shards:
                raise ValueError(f"{added} of {self.shards} shards")
        for split, mine in self.moments.items():
            mine.tensors = moments[split].tensors
        self.added = added

    def source_rows(self, shard: int) -> None:
        self._rows(shard, 0)

    def target_rows(self, shard: int) -> None:
        self._rows(shard, 1)

    def _path(self, side: int | str, shard: int) -> Path:
        name = ("source", "target")[side] if isinstance(side, int) else side
        return self.out / f"{name}-{shard:05d}.safetensors"

    def _sequences(self, shard: int) -> range:
        start = shard * self.options.shard
        return range(start, min(start + self.options.shard, self.token_ids.shape[0]))

    def _rows(self, shard: int, side: int) -> None:
        path, members = self._path(side, shard), self._sequences(shard)
        places = torch.arange(0, self.token_ids.shape[1], self.options.stride)
        position = places.repeat(len(members))
        sequence = torch.tensor(members).repeat_interleave(len(places))
        # The first's word: another's look at the folder may come after the first's next change.
        if self.team.same(shard < self.added or self._is_made(path, side, position, sequence)):
            return
        loaded = self.models.open(side)
        kept, lookback, late = len(places), LOOKBACK * (side == 0), self.options.lookback_layers
        rows = len(members) * kept if self.team.keeps else 0
        # In one piece: pieces of a megabyte or two would lie among what passes, and leave holes.
        block = torch.empty(
            rows * row_width(loaded.signature.geometry, lookback * len(late)), dtype=loaded.dtype
        )
        tensors: dict[str, Tensor] = {}
        for start in range(0, len(members), self.options.batch):
            batch = members[start : start + self.options.batch]
            # Into their place at once: joined at the end, all rows would be held twice.
            for name, part in content_rows(
                loaded, self.token_ids[list(batch)], self.options.stride, lookback, late
            ):
                if not self.team.keeps:
                    continue
                if name not in tensors:
                    own, block = block.tensor_split([rows * part[0].numel()])
                    tensors[name] = own.view(rows, *part.shape[1:])
                tensors[name][start * kept :][: len(part)] = part
        if not self.team.keeps:
            return
        tensors |= {"position": position, "sequence": sequence}
        artifacts.write(path, "dump", tensors, {"model": loaded.signature.to_json()}, private=True)

    def _is_made(self, path: Path, side: int, position: Tensor, sequence: Tensor) -> bool:
        """Return whether a shard's rows of some tokens [n] are there; damaged ones are not."""
        if not path.exists():
            return False
        name, model = (("source", self.models.source), ("target", self.models.target))[side]
        late = () if side else self.options.lookback_layers
        try:
            _, *found = load_side(path, name, model, late)
        except UsageError:
            return False
        return all(map(torch.equal, found, (position, sequence)))

    def add_moments(self, shard: int) -> None:
        """Add a shard's rows to the moments; without a dump, keep it until they are on disk."""
        if not self.options.moments or not self.team.keeps or shard < self.added:
            return
        paths = (self._path(0, shard), self._path(1, shard))
        pair = (self.models.source, self.models.target)
        rows, position, sequence = load_rows(*paths, pair, self.options.lookback_layers)
        head = position < self.options.native_head
        out = self.held_out[sequence]
        for split, members in (("train", ~out), ("held_out", out)):
            self.moments[split].update(rows, (members & ~head).nonzero()[:, 0])
        if head.any():
            self._write_head(shard, rows, head, out)
        self.added = shard + 1
        if not self.options.dump and time.monotonic() - self.saved_at > SAVE_SECONDS:
            self._save_partial()

    def _write_head(self, shard: int, rows: Rows, head: Tensor, out: Tensor) -> None:
        tensors = {
            f"{side}.{kind}.{layer}": tensor[head]
            for (side, kind), layers in rows.entries.items()
            for layer, tensor in layers.items()
        }
        artifacts.write(
            self._path("head", shard), "dump", tensors | {"held_out": out[head]}, {}, private=True
        )

    def _save_partial(self) -> None:
        save_moments(self.out / self.partial, self.moments, {"shards": self.added, **self._scope()})
        self._drop_rows(self.added)
        self.saved_at = time.monotonic()

    def _scope(self) -> dict[str, Any]:
        return {
            **asdict(self.options.scope),
            "source": self.models.source.to_json(),
            "target": self.models.target.to_json(),
        }

    def _drop_rows(self, shards: int) -> None:
        for shard in self.team.shards(shards):
            for side in (0, 1):
                self._path(side, shard).unlink(missing_ok=True)

    def finish(self) -> Calibration:
        """Write moments and index, and tidy up."""
        for moments in self.moments.values():
            self.team.pool(moments)
        self.team.agree(True)  # every shard is there
        if self.team.first:
            self._write_index()
        self.team.agree(True)
        return self.tidy()

    def _write_index(self) -> None:
        if self.options.moments:
            save_moments(self.out / MOMENTS, self.moments, self._scope())
        shards = range(self.shards)
        data = {
            "kind": "calibration",
            "source": self.models.source.to_json(),
            "target": self.models.target.to_json(),
            "options": asdict(self.options),
            "text": self.text,
            "tokens_digest": json_digest(self.token_ids.tolist()),
            "sequences": self.token_ids.shape[0],
            "length": self.token_ids.shape[1],
            "shards": [
                {
                    "source": self._path(0, s).name,
                    "target": self._path(1, s).name,
                    "sequences": len(self._sequences(s)),
                }
                for s in (shards if self.options.dump else ())
            ],
            "heads": [
                path.name for path in (self._path("head", s) for s in shards) if path.exists()
            ],
        }
        write_index(self.out, data)

    def tidy(self) -> Calibration:
        """Remove what only a resumed run needs; what names the run goes last."""
        if not self.options.dump:
            self._drop_rows(self.shards)
        (self.out / self.partial).unlink(missing_ok=True)
        self.team.agree(True)
        (self.out / RUN).unlink(missing_ok=True)
        return Calibration.open(self.out)
