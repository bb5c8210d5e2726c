"""A pair on which a linear map fails by construction, and what networks bring there.

    python examples/nonlinear_pair.py --methods closed-form,residual,mlp

The source is tiny-l itself, but what it caches is twisted: each plane (i, i + D/2) of a key, and
of a value, is turned by an angle that grows with the plane's length. Lengths do not change, so
its attention turns everything back before it reads, and the source says what tiny-l says; a
plane's length does not change under RoPE either, so the twist is one in content space. To know the
angle a map must know the length, which no linear function of the plane does.
"""

import argparse
import os
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from kvmap import fit, models, pipeline
from kvmap.collect import collect
from kvmap.collect_options import CollectOptions
from kvmap.collect_pair import Loading, TextOptions, read_text
from kvmap.evaluate.evaluation import EvaluateOptions, evaluate
from kvmap.models import LoadedModel

# Of a plane that is turned `turns` times; a constant, so that the twist can be undone. Entries of
# tiny-l are about as long.
LENGTH = 2.0


def twist(entries: Tensor, turns: float) -> Tensor:
    """Turn each plane of [..., D] by `turns` full turns times its length over LENGTH."""
    x, y = entries.float().chunk(2, dim=-1)
    length = (x.square() + y.square()).sqrt()
    angle = 2 * torch.pi * turns * length / LENGTH
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((x * cos - y * sin, y * cos + x * sin), dim=-1).to(entries.dtype)


class Twisted(nn.Module):
    """A module whose outputs, heads of D channels, are twisted."""

    def __init__(self, inner: nn.Module, size: int, turns: float) -> None:
        super().__init__()
        self.inner, self.size, self.turns = inner, size, turns

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        return twist(made.unflatten(-1, (-1, self.size)), self.turns).flatten(-2).view_as(made)


def twisted(name: str, turns: float) -> LoadedModel:
    """Load a model and twist what it caches, not what it says."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def read(module, query, key, value, *rest, **options):
        key, value = twist(key, -turns), twist(value, -turns)
        return sdpa_attention_forward(module, query, key, value, *rest, **options)

    AttentionInterface.register("sdpa_untwisted", read)
    AttentionMaskInterface.register("sdpa_untwisted", sdpa_mask)
    loaded = models.load(name, dtype="float32")
    size = loaded.signature.geometry.head_size
    for layer in loaded.model.model.layers:
        layer.self_attn.k_norm = Twisted(layer.self_attn.k_norm, size, turns)
        layer.self_attn.v_proj = Twisted(layer.self_attn.v_proj, size, turns)
    loaded.model.config._attn_implementation = "sdpa_untwisted"
    signature = replace(loaded.signature, name=f"{name}-twisted", weights_digest="twisted")
    return replace(loaded, signature=signature)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="tiny-l")
    parser.add_argument("--methods", default="closed-form,residual,mlp")
    parser.add_argument("--turns", type=float, default=0.5)
    parser.add_argument("--sequences", type=int, default=120)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--questions", type=int, default=60)
    asked = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    pair = (twisted(asked.model, asked.turns), models.load(asked.model, dtype="float32"))
    openers = tuple(lambda model=model: model for model in pair)
    text = TextOptions("demo", sequences=asked.sequences, length=asked.length)
    ids = read_text((asked.model, asked.model), text, Loading()).token_ids
    options = CollectOptions(stride=1, heads="all", joint=True)
    recipe = fit.recipe("kvmap")
    recipe = replace(recipe, options=replace(recipe.options, anchor=False, lookback=0))
    layers = tuple((at,) for at in range(pair[1].signature.geometry.layers))
    with tempfile.TemporaryDirectory() as folder:
        calibration = collect(openers, ids, Path(folder) / "calib", options, {})
        print("| method | R² K / V | native | source | mapped | raw copy | wrong document | KL |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        for method in asked.methods.split(","):
            wanted = replace(recipe, method=method, width=asked.width)
            cmap = pipeline.fit_map(calibration, layers, wanted, lambda *_: None, openers).cmap
            tasks = EvaluateOptions(("demo",), asked.questions, (asked.length,), diagnosed=0)
            arms = evaluate(cmap, *pair, tasks).figures["arms"]
            r2 = cmap.provenance["r2"]["held_out"]
            shown = ("native", "source", "mapped", "raw_copy", "wrong_document")
            cells = [f"{r2['key']:.3f} / {r2['value']:.3f}"]
            cells += [f"{arms[name]['accuracy']:.2f}" for name in shown]
            print(f"| {method} | " + " | ".join(cells) + f" | {arms['mapped']['kl']:.3f} |")


if __name__ == "__main__":
    main()
