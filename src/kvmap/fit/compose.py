"""One map from two: source → hub → target, where both are linear maps of the same rows.

A target layer's y = Σ_j h_j·B_j + b over the hub's layers j, each h_j = xA_j + a_j, so
y = x·ΣA_jB_j + (b + Σ a_jB_j): exact, in content space, whatever either map's heads. The
second map's anchor and exact layers are the target's own and stay; a first map that has some
needs the hub itself and cannot be composed. What the hub would have computed natively (head,
tail) does not exist in the composed map.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvmap.columns import KINDS, head_sizes
from kvmap.errors import UsageError
from kvmap.map_options import input_blocks
from kvmap.mapping import Affine, CacheMap, LayerMap

# By (layer, kind, head) of one model: the rows of a weight that read it.
Rows = dict[tuple[str, int, str, int], slice]


def compose(first: CacheMap, second: CacheMap) -> CacheMap:
    """Return the map that applies `first`, then `second`; all heads, both kinds where either is.

    Raises:
        UsageError: The maps do not meet, or are not both linear in the source's entries.
    """
    _check(first, second)
    options = replace(
        second.options,
        heads="all",
        joint=first.options.joint or second.options.joint,
        lookback=first.options.lookback,
        lookback_layers=first.options.lookback_layers,
        assignment=(),
    )
    empty = CacheMap(first.source, second.target, (), options)
    layers = tuple(
        layer and _composed(first, second, index, empty)
        for index, layer in enumerate(second.layers)
    )
    provenance = {"composed": [first.provenance, second.provenance]}
    return replace(empty, layers=layers, provenance=provenance)


def _check(first: CacheMap, second: CacheMap) -> None:
    remedy = "give a second map whose source that is"
    first.target.require_same(second.source, "the first map's target", remedy)
    problems = []
    if first.needs_target:
        problems.append(
            f"the first map reads {first.target.name}'s own first layer, which a composed map "
            "does not have; fit it with `--no-anchor --no-exact-first`"
        )
    if second.options.lookback:
        problems.append(
            f"the second map reads {second.source.name}'s tokens before, which a composed map "
            "does not have; fit it with `--lookback 0`"
        )
    if problems:
        raise UsageError("; and ".join(problems))
    for cmap in (first, second):
        if any(part.network for layer in cmap.layers if layer for part in (layer.key, layer.value)):
            raise UsageError(
                f"the map {cmap.source.name} → {cmap.target.name} has networks, and only linear "
                "maps compose; fit it in closed form"
            )


def _composed(first: CacheMap, second: CacheMap, index: int, empty: CacheMap) -> LayerMap:
    hubs = second.layers[index].source_layers
    sources = tuple(sorted({s for hub in hubs for s in first.layers[hub].source_layers}))
    parts = []
    for kind in KINDS:
        rows, size = input_rows(empty, sources, kind)
        inner, _ = input_rows(second, hubs, kind)
        outer, bias = dense(second, index, kind)
        weight = outer.new_zeros(size, outer.shape[1])
        for (side, hub, part, head), own in inner.items():
            if side == "target":  # the anchors pass through
                weight[rows[side, hub, part, head]] += outer[own]
                continue
            made, shift = _hub_head(first, hub, part, head, rows, size)
            weight += made @ outer[own]
            bias = bias + shift @ outer[own]
        parts.append(Affine(weight[None].float(), bias[None].float()))
    return LayerMap(sources, *parts)


def _hub_head(
    first: CacheMap, hub: int, kind: str, head: int, rows: Rows, size: int
) -> tuple[Tensor, Tensor]:
    """Return one head of the hub as a map [size, D] of the composed inputs, and its bias [D]."""
    weight, bias = dense(first, hub, kind)
    width = first.target.geometry.head_size
    own = slice(head * width, (head + 1) * width)
    made = weight.new_zeros(size, width)
    for name, place in input_rows(first, first.layers[hub].source_layers, kind)[0].items():
        made[rows[name]] = weight[place, own]
    return made, bias[own]


def input_rows(cmap: CacheMap, layers: tuple[int, ...], kind: str) -> tuple[Rows, int]:
    """Return where each (side, layer, kind, head) stands in all heads' inputs, and their number."""
    source, target = cmap.source.geometry, cmap.target.geometry
    heads, sizes = (source.kv_heads, target.kv_heads), head_sizes(source, target)
    rows, stop = {}, 0
    for block in input_blocks(cmap.options, layers, kind, None, heads):
        start, stop = stop, stop + sizes[block.side]
        rows[block.side, block.layer, block.kind, block.head] = slice(start, stop)
    return rows, stop


def dense(cmap: CacheMap, index: int, kind: str) -> tuple[Tensor, Tensor]:
    """Return a part as one float64 weight [P, H_t·D_t] over all heads' inputs, and its bias."""
    layer = cmap.layers[index]
    part = layer.of(kind)
    weight = part.matrix
    bias = part.bias.double().flatten()
    if cmap.options.heads == "all":
        return weight[0], bias
    rows, size = input_rows(cmap, layer.source_layers, kind)
    width = weight.shape[2]
    whole = weight.new_zeros(size, len(weight) * width)
    for head, own in enumerate(weight):
        start = 0
        for (side, _, _, other), place in rows.items():
            if other == (head if side == "target" else cmap.options.assignment[head]):
                stop = start + place.stop - place.start
                whole[place, head * width : (head + 1) * width] = own[start:stop]
                start = stop
    return whole, bias
