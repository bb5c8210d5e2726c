"""Apply a map: strip, lay side by side, one product per target layer and kind, turn, store.

A chunk of tokens is stripped once, every source layer that any target layer reads, into
X [G, B·T, C]: G groups of heads that share a regression (all heads together, or one target
head each); columns by source layer, keys beside values where they are joint, the target's own
first layer and the source's layers of the tokens before last. A target layer's inputs are columns
of X: a view where they lie together, else gathered into one reused buffer. Its keys are X·W + b
turned to their positions, its values X·W + b, both written into the cache they are for. The chunk
is as long as a fixed number of extra bytes allows, so memory beside the two caches does not grow
with T.

On CUDA one kernel does all of this (`kvmap.engine.fused`), where triton is there and the map is
one that it computes; KVMAP_TRITON=0 turns it off.
"""

from __future__ import annotations

import os
from functools import cache as cached
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvmap.cache import KVCache
from kvmap.engine.chunk import Chunk, FirstLayer
from kvmap.engine.paged import PagedCache
from kvmap.engine.precision import compute_dtype, prepare
from kvmap.engine.room import allocate, empty_cache
from kvmap.engine.trail import Trail
from kvmap.engine.workspace import EXTRA_BYTES, Workspace

if TYPE_CHECKING:
    from kvmap.mapping import CacheMap

__all__ = [
    "EXTRA_BYTES",
    "FirstLayer",
    "PagedCache",
    "allocate",
    "apply",
    "compute_dtype",
    "empty_cache",
    "prepare",
]


def apply(
    cmap: CacheMap,
    cache: KVCache,
    first: FirstLayer | None,
    out: KVCache | PagedCache,
    before: KVCache | None = None,
) -> None:
    """Write the target's cache for the source's into `out`.

    Args:
        cache: The source's; keys rotated, [B, H_s, T, D_s].
        first: Keys and values of the target's own lowest layers, where the map reads them.
        out: [B, H_t, T, D_t] per layer; views of a larger cache will do. Or blocks, in which the
            fused kernel stores at once, and the plain engine a chunk at a time, mapped beside them.
        before: The source's cache of the tokens before these, where there are any.
    """
    make, work = Chunk, None
    if kernel_wanted(cache.keys[0].is_cuda):
        from kvmap.engine import fused

        if fused.usable(cmap, cache, first, out):
            make, work = fused.FusedChunk, fused.FusedPlan.of(cmap, cache)
    work = work or Workspace.of(cmap, cache)
    for start in range(0, cache.tokens, work.chunk):
        stop = min(start + work.chunk, cache.tokens)
        part = None if first is None else tuple(tensor[:, :, start:stop] for tensor in first)
        options = cmap.options
        trail = Trail.of(cache, start, stop, options, before) if options.lookback else None
        read, place = cache.slice(start, stop), out.slice(start, stop)
        chunk = make(cmap, read, part, work, trail)
        if isinstance(place, KVCache) or make is not Chunk:
            chunk.write(place)
            continue
        made = allocate(cmap.target.geometry, read, place.keys[0].dtype)
        chunk.write(made)
        for index in range(made.layers):
            place.store_layer(index, made.keys[index], made.values[index])


def kernel_wanted(on_cuda: bool) -> bool:
    """Return whether the fused kernel is to be used where it computes a map.

    On CUDA where triton is installed, unless KVMAP_TRITON is 0; on a CPU only where it is 1 and
    triton's interpreter is on.
    """
    asked = os.environ.get("KVMAP_TRITON")
    wanted = asked != "0" if on_cuda else asked == os.environ.get("TRITON_INTERPRET") == "1"
    return wanted and _has_triton()


@cached
def _has_triton() -> bool:
    return find_spec("triton") is not None
