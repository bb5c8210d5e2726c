"""The only package that touches transformers: names, loading, running."""

from kvmap.models.load import load
from kvmap.models.loaded import LoadedModel
from kvmap.models.lowest import load_lowest, save_lowest
from kvmap.models.run import (
    continue_logits,
    first_layer,
    from_dynamic_cache,
    generate,
    lowest_layers,
    prefill,
    to_dynamic_cache,
)
from kvmap.names import Checkpoint, resolve

__all__ = [
    "Checkpoint",
    "LoadedModel",
    "continue_logits",
    "first_layer",
    "from_dynamic_cache",
    "generate",
    "load",
    "load_lowest",
    "lowest_layers",
    "prefill",
    "resolve",
    "save_lowest",
    "to_dynamic_cache",
]
