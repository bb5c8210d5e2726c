"""What evaluation tests measure: a planted twin with the right map, and questions about it."""

from functools import cache

import planted
import torch
from checkpoints import byte_tokenizer

from kvmap.evaluate.items import Item, Probe, Task
from kvmap.mapping import Affine, CacheMap, LayerMap, MapOptions
from kvmap.models import Checkpoint, LoadedModel, prefill
from kvmap.models.load import wrap


@cache
def twin() -> tuple[CacheMap, LoadedModel, LoadedModel]:
    """Return the map that is right, source and target."""
    found = planted.twin("llama", 11)
    source, target = (
        wrap(model, byte_tokenizer(), Checkpoint(name, "planted"))
        for name, model in (("source", found.source), ("target", found.target))
    )
    layers = tuple(
        LayerMap((s,), *(Affine(w.T[None].clone(), torch.zeros(1, len(w))) for w in (key, value)))
        for s, key, value in zip(found.source_layers, found.keys, found.values, strict=True)
    )
    return CacheMap(source.signature, target.signature, layers, MapOptions()), source, target


def contexts(count: int, tokens: int, seed: int = 1) -> list[tuple[int, ...]]:
    """Draw documents of ordinary tokens."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(4, 260, (count, tokens), generator=generator)
    return [tuple(row) for row in drawn.tolist()]


@cache
def questions(documents: int = 12, each: int = 3) -> Task:
    """Return questions that the target, reading by itself, answers right by construction."""
    target = twin()[2]
    items = []
    for index, context in enumerate(contexts(documents, 24, seed=3)):
        probes = []
        for prompt in contexts(each, 3, seed=100 + index):
            logits = prefill(target, torch.tensor([context + prompt]))[1][0, -1]
            # The likeliest wrong tokens: only what the context says sets the first apart.
            choices = tuple((token,) for token in logits.topk(8).indices.tolist())
            probes.append(Probe(prompt, choices[0], choices, labels={"order": len(probes)}))
        items.append(Item(context, tuple(probes)))
    return Task("planted", tuple(items), chance=1 / 8)
