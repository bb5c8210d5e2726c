"""What this machine can do at most: measured, so that shares of it mean something."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kvmap.bench.clock import Clock

MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 31}
TRIES = 8


@dataclass(frozen=True)
class Machine:
    """A device and its measured peaks.

    Attributes:
        matmul_flops: FLOP/s of a large square product in `dtype`, the best of a few.
        copy_bytes: Bytes per second of a large copy, read and written counted.
    """

    device: str
    name: str
    threads: int
    dtype: str
    torch: str
    clock: str
    matmul_flops: float
    copy_bytes: float

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)


def measure_machine(clock: Clock, dtype: torch.dtype) -> Machine:
    """Measure a device's matmul and copy peaks, in seconds of the clock that the bench uses."""
    device = clock.device
    kind = "cuda" if device.type == "cuda" else "cpu"
    size = MATMUL_SIZE[kind]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = min(clock.timed(lambda: a @ b)[1] for _ in range(TRIES))
    x = torch.zeros(COPY_BYTES[kind] // 4, device=device)
    y = torch.empty_like(x)
    copy = min(clock.timed(lambda: y.copy_(x))[1] for _ in range(TRIES))
    return Machine(
        str(device),
        torch.cuda.get_device_name(device) if kind == "cuda" else _cpu_name(),
        torch.get_num_threads(),
        str(dtype).removeprefix("torch."),
        torch.__version__,
        "CPU time" if clock.cpu_time else "wall",
        2 * size**3 / product,
        2 * x.nbytes / copy,
    )


def _cpu_name() -> str:
    return f"{platform.machine()} CPU, {torch.backends.cpu.get_cpu_capability()}"
