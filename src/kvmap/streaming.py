"""Map while the source still reads: at the handoff only the last chunk is left.

A session keeps a shadow of the source's cache: the target's, chunk by chunk as the source
prefills or decodes. Like the source's cache it can be cropped, when a turn is taken back, and
forked, when one context is continued in several ways. The first tokens that the target reads
itself are prefilled as they come. The last ones are mapped too, since nobody knows yet that
they are the last, and run again by the target at the handoff.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvmap.cache import KVCache, check_shapes
from kvmap.engine import empty_cache, prepare
from kvmap.errors import UsageError
from kvmap.geometry import Geometry
from kvmap.handoff import Handoff, LapClock, check_pair, map_middle
from kvmap.mapping import CacheMap
from kvmap.models import LoadedModel, prefill

FIRST_ROOM = 1024


class StreamingMap:
    """The target's cache of what a source has read so far, [B, H_t, T, D_t] per layer.

    Contexts start at position 0 and have no padding.
    """

    def __init__(self, cmap: CacheMap, target: LoadedModel, capacity: int = FIRST_ROOM) -> None:
        """Start with nothing read.

        Args:
            capacity: Tokens to make room for; grows when they are full.

        Raises:
            UsageError: The target is not the map's.
        """
        check_pair(cmap, None, target)
        self.cmap = prepare(cmap, target.device)
        self.target = target
        self.tokens = 0
        self.capacity = capacity
        self.room: KVCache | None = None
        # The source's layers that later tokens look back to.
        self.read: KVCache | None = None

    @property
    def cache(self) -> KVCache:
        """The target's cache of all tokens so far, as views that a crop may overwrite."""
        if not self.tokens:
            raise UsageError("nothing has been read yet; append the source's cache first")
        return self.room.slice(0, self.tokens)

    def follow(self, source_cache: KVCache) -> None:
        """Map what the source's whole cache holds beyond what has been mapped.

        Raises:
            UsageError: As `append` says.
        """
        check_shapes(source_cache, self.cmap.source, "the source's cache")
        if source_cache.tokens > self.tokens:
            self.append(source_cache.slice(self.tokens, source_cache.tokens))

    def append(self, chunk: KVCache) -> None:
        """Map the next tokens of the source's cache.

        Raises:
            UsageError: They are not of the source's shape, do not follow on what was read or go
                beyond what the target reads, or their token ids are missing or not of its
                vocabulary.
        """
        self._check(chunk)
        stop = self.tokens + chunk.tokens
        self._make_room(chunk, stop)
        for room in (self.room, self.read):
            room.positions[:, self.tokens : stop] = chunk.positions
            room.token_ids[:, self.tokens : stop] = chunk.token_ids
        late = chunk.only(self.cmap.options.lookback_layers)
        late.copy_to(self.read.slice(self.tokens, stop))
        own = max(0, min(self.cmap.options.native_head, stop) - self.tokens)
        if own:
            past = self.cache if self.tokens else None
            prefill(self.target, chunk.token_ids[:, :own], past=past, room=self.room)
        if own < chunk.tokens:
            place = self.room.slice(self.tokens + own, stop)
            begun = self.tokens + own
            past, before = (r.slice(0, begun) if begun else None for r in (self.room, self.read))
            middle = chunk.slice(own, chunk.tokens)
            map_middle(self.cmap, self.target, middle, None, place, past, before)
        self.tokens = stop

    def _check(self, chunk: KVCache) -> None:
        check_shapes(chunk, self.cmap.source, "the chunk")
        if chunk.token_ids is None or chunk.mask is not None:
            raise UsageError("a session takes caches with token ids and without padding")
        batch = len(chunk.positions)
        if self.room is not None and batch != len(self.room.positions):
            raise UsageError(
                f"the chunk is of {batch} sequences, expected {len(self.room.positions)} as of "
                "those before; start a session for each batch"
            )
        self.target.require_positions(self.tokens + chunk.tokens)
        self.target.require_tokens(chunk.token_ids)
        wanted = torch.arange(self.tokens, self.tokens + chunk.tokens)
        if not bool((chunk.positions.cpu() == wanted).all()):
            raise UsageError(
                f"the chunk begins at position {int(chunk.positions[0, 0])}, expected "
                f"{self.tokens} and then one by one; crop the session or append what is missing"
            )

    def _make_room(self, chunk: KVCache, tokens: int) -> None:
        if self.room is not None and tokens <= self.room.tokens:
            return
        self.capacity = max(self.capacity, tokens, 2 * self.tokens)
        self._grow(chunk.positions.shape[0], chunk.keys[0].dtype, self.room, self.read)

    def _grow(
        self, batch: int, dtype: torch.dtype, room: KVCache | None, read: KVCache | None
    ) -> None:
        """Make room for the capacity, and copy there what has been read so far."""
        layers = len(self.cmap.options.lookback_layers)
        late = replace(self.cmap.source.geometry, layers=layers)
        target = self.target
        self.room = self._empty(batch, target.signature.geometry, target.dtype, target.places)
        self.read = self._empty(batch, late, dtype)
        if room is not None:
            _copy(room.slice(0, self.tokens), self.room)
            _copy(read.slice(0, self.tokens), self.read)

    def _empty(
        self,
        batch: int,
        geometry: Geometry,
        dtype: torch.dtype,
        places: Sequence[torch.device] | None = None,
    ) -> KVCache:
        positions = torch.zeros(batch, self.capacity, dtype=torch.long, device=self.target.device)
        made = empty_cache(geometry, positions, dtype, places)
        return KVCache(made.keys, made.values, positions, torch.zeros_like(positions))

    def crop(self, tokens: int) -> None:
        """Forget all but the first tokens."""
        if not 0 <= tokens <= self.tokens:
            raise UsageError(f"cannot crop {self.tokens} tokens to {tokens}")
        self.tokens = tokens

    def fork(self) -> StreamingMap:
        """Return a session that goes on from here on its own."""
        twin = StreamingMap(self.cmap, self.target, self.capacity)
        if self.room is not None:
            twin.tokens = self.tokens
            batch, dtype = self.room.positions.shape[0], self.read.keys[0].dtype
            twin._grow(batch, dtype, self.room, self.read)
        return twin

    def handoff(self) -> Handoff:
        """Let the target run the last tokens itself and return its cache and logits.

        The session then holds the target's own entries for them.

        Raises:
            UsageError: Nothing has been read.
        """
        token_ids = self.cache.token_ids
        clock = LapClock(self.target.device)
        start = self.tokens - self.cmap.options.tail_length(self.tokens)
        past = self.room.slice(0, start) if start else None
        cache, logits = prefill(self.target, token_ids[:, start:], past=past, room=self.room)
        clock.lap("tail")
        mapped = start > self.cmap.options.native_head
        outcome = "applied" if mapped else "fallback_reprefill"
        return Handoff(cache, logits[:, -1], outcome, clock.seconds)


def _copy(source: KVCache, room: KVCache) -> None:
    """Copy a cache, positions and tokens too, to the front of a room."""
    source.copy_to(room)
    room.positions[:, : source.tokens] = source.positions
    room.token_ids[:, : source.tokens] = source.token_ids
