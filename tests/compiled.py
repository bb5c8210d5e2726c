"""Compile the fused kernel for GPUs that need not be here, and print what came of it as JSON."""

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvmap.engine.fused import Tile
from kvmap.engine.kernel import map_tile

POINTERS = {"tensors": "*i64", "steps": "*i32", "cos": "*fp32", "sin": "*fp32", "slots": "*i64"}
NUMBERS = (
    *("turn", "block", "tokens", "count", "room", "inputs"),
    *("out_batch", "out_head", "out_token"),
)
PRODUCTS = {80: "mma.sync", 90: "wgmma.mma"}


def compiled(capability: int, size: int, paged: bool) -> dict[str, int]:
    """Compile for bf16 heads of a size, keys and anchors among them, everything aligned."""
    tile = Tile.of(size, 2)
    constants = {
        "per_group": 1,
        "size": size,
        "strips": True,
        "turns": True,
        "rows": tile.rows,
        "planes": tile.planes,
        "half": size // 2,
        "aligned": True,
        "paged": paged,
        "widen": False,
    }
    kinds = dict.fromkeys(("entries", "weight", "bias", "out"), "*bf16") | POINTERS
    kinds |= dict.fromkeys(NUMBERS, "i32") | dict.fromkeys(constants, "constexpr")
    whole = [*(n for n in kinds if kinds[n][0] == "*"), "out_batch", "out_head", "out_token"]
    attributes = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(map_tile.arg_names)
        if name in (*whole, "inputs", "turn")
    }
    made = triton.compile(
        ASTSource(map_tile, kinds, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    code = made.asm["ptx"]
    return {
        "capability": capability,
        "head_size": size,
        "shared_bytes": made.metadata.shared,
        "products": code.count(PRODUCTS[capability]),
        "narrow_loads": len(re.findall(r"ld\.global\.[bu]16", code)),
    }


if __name__ == "__main__":
    sizes = ((128, False), (128, True), (256, False))
    json.dump([compiled(cc, *size) for cc in PRODUCTS for size in sizes], sys.stdout)
