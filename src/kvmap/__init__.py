"""Map one language model's KV cache onto another's, so that the other need not read again.

Importing this package loads neither torch nor transformers: names are looked up when used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "CacheMap": "kvmap.mapping",
    "Calibration": "kvmap.calibration",
    "KVCache": "kvmap.cache",
    "KvmapError": "kvmap.errors",
    "UsageError": "kvmap.errors",
    "load": "kvmap.models",
}

__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'kvmap' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
