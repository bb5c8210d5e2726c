"""Made-up cache entries of two models, in the package's shapes and as plain matrices."""

import itertools

import numpy as np
import torch

from kvmap.columns import BACK, KINDS, Block, groups, head_sizes
from kvmap.geometry import Geometry, RopeTable
from kvmap.moments import Moments, Rows

SIDES = ("source", "target")


def geometry(layers: int, heads: int, size: int, theta: float = 1e4, **changes) -> Geometry:
    """Describe a made-up model; its RoPE turns all channels but the last two, with a scaling."""
    planes = size // 2 - 1
    table = RopeTable(tuple(theta ** (-i / planes) for i in range(planes)), 1.25)
    fields = {
        "layers": layers,
        "kv_heads": heads,
        "head_size": size,
        "query_heads": heads,
        "hidden_size": heads * size,
        "vocabulary": 50,
        "max_positions": 4096,
        "model_type": "made-up",
        "rope": (table,) * layers,
    }
    return Geometry(**(fields | changes))


SOURCE = geometry(3, 2, 4)
TARGET = geometry(2, 4, 6, theta=5e5)


def noise(
    count: int, source=SOURCE, target=TARGET, seed: int = 0, mean: float = 0.0, late=(0,)
) -> Rows:
    """Draw entries without any relation between or within the models.

    `late` are the source layers drawn of the tokens before.
    """
    generator = torch.Generator().manual_seed(seed)
    entries = {}
    for side, shape in zip(SIDES, (source, target), strict=True):
        for kind in KINDS:
            size = (shape.layers, count, shape.kv_heads, shape.head_size)
            drawn = torch.randn(size, generator=generator, dtype=torch.float64) + mean
            entries[side, kind] = dict(enumerate(drawn.float()))
    for side, kind in itertools.product(BACK, KINDS):
        size = (len(late), count, source.kv_heads, source.head_size)
        drawn = torch.randn(size, generator=generator, dtype=torch.float64) + mean
        entries[side, kind] = dict(zip(late, drawn.float(), strict=True))
    return Rows(entries)


def related(
    count: int, source=SOURCE, target=TARGET, seed: int = 0, unexplained: float = 0.3
) -> Rows:
    """Draw entries where the target's are linear in all of the source's, but for some noise.

    The relation is the same for every seed.
    """
    rows = noise(count, source, target, seed)
    everything = matrix(rows, [b for kind in KINDS for b in blocks(source, "source", kind)])
    relation = np.random.default_rng(99)
    for kind in KINDS:
        made = {}
        for at, layer in rows.entries["target", kind].items():
            weight = relation.normal(size=(everything.shape[1], layer[0].numel()))
            image = everything @ weight / np.sqrt(everything.shape[1]) + 3
            made[at] = torch.from_numpy(image).float().view_as(layer) + unexplained * layer
        rows.entries["target", kind] = made
    return rows


def blocks(shape: Geometry, side: str, kind: str) -> list[Block]:
    """List all blocks of one side and kind."""
    return [Block(side, kind, lay, h) for lay in range(shape.layers) for h in range(shape.kv_heads)]


def matrix(rows: Rows, wanted: list[Block]) -> np.ndarray:
    """Lay blocks side by side as [n, p] float64, one column at a time."""
    columns = []
    for block in wanted:
        entry = rows.entries[block.side, block.kind][block.layer]
        columns += [entry[:, block.head, d].double().numpy() for d in range(entry.shape[2])]
    return np.stack(columns, axis=1)


def part(rows: Rows, start: int, stop: int) -> Rows:
    """Take some of the rows."""
    return Rows(
        {name: {at: t[start:stop] for at, t in ts.items()} for name, ts in rows.entries.items()}
    )


def moments(
    rows: Rows, source=SOURCE, target=TARGET, heads: str = "all", joint: bool = True
) -> Moments:
    """Accumulate rows in one go."""
    made = empty(source, target, heads, joint)
    made.update(rows)
    return made


def empty(source=SOURCE, target=TARGET, heads: str = "all", joint: bool = True) -> Moments:
    """Return accumulators that have seen nothing."""
    return Moments(groups(source, target, heads, joint), head_sizes(source, target))
