"""Train, export and judge the three demo models that live in the package.

    python examples/train_tiny.py
    python examples/train_tiny.py train tiny-s tiny-m tiny-l --out runs/tiny
    python examples/train_tiny.py export --out runs/tiny --to runs/tiny/export
    python examples/train_tiny.py evaluate [--models FOLDER]
    python examples/train_tiny.py card --out runs/tiny
    python examples/train_tiny.py train tiny-deep tiny-long --compile
    python examples/train_tiny.py export tiny-deep tiny-long --to models

The package does not hold tiny-deep, eight layers of eight KV heads, practised on stories of up
to 4,096 words, and tiny-long, which is tiny-l after as long ones. docs/recipes.md has what was
measured with them.

Without a command all of it is done: train, export into the package, write the card.
`train` resumes from its last checkpoint. `evaluate` prints the figures of the
model card; `card` measures them again and writes `README.md`, `card.json` and
`curves.jsonl` beside the packaged checkpoints.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F

from kvmap.demo import MODELS, checkpoint_path
from kvmap.demo.card import measure, write_card
from kvmap.demo.card_text import summary
from kvmap.demo.muon import Muon
from kvmap.demo.recipe import PAD, PASSED, SCHEDULES, STAGES, Batch, build, draw
from kvmap.demo.tokens import save_tokenizer
from kvmap.demo.world import seed_of

ANSWER_WEIGHT, PROSE_WEIGHT, OWNER_WEIGHT = 3.0, 0.1, 0.3
MUON_RATE, ADAM_RATE = 0.02, 3e-3
RUNS = Path("runs/tiny")
LOG_SECONDS, SAVE_SECONDS = 20, 120


@dataclass
class Progress:
    """Where a run stands; running means by kind of question are part of it."""

    step: int = 0
    tokens: int = 0
    stage: int = 0
    entered: int = 0  # step at which this stage began
    seconds: float = 0.0
    loss: float = 0.0
    right: dict[str, float] = field(default_factory=dict)

    def observe(self, loss: float, kinds: list[str], hits: list[bool]) -> None:
        """Take in one step."""
        self.loss = loss if self.step == 1 else 0.98 * self.loss + 0.02 * loss
        for kind, hit in zip(kinds, hits, strict=True):
            self.right[kind] = 0.995 * self.right.get(kind, 0.0) + 0.005 * hit

    def advance(self, last: int) -> None:
        """Move on a stage once every kind of this one is answered well enough."""
        asked = STAGES[self.stage].kinds
        settled = self.step - self.entered > 60
        if settled and self.stage < last and min(self.right.get(k, 0) for k in asked) > PASSED:
            self.stage, self.entered = self.stage + 1, self.step

    def row(self) -> dict:
        """Say it for the log."""
        plain = {
            "step": self.step,
            "tokens": self.tokens,
            "stage": self.stage,
            "seconds": round(self.seconds),
        }
        return (
            plain
            | {"loss": round(self.loss, 4)}
            | {k: round(v, 3) for k, v in sorted(self.right.items())}
        )


class Trainer:
    """One model, its two optimizers and its progress, on disk between steps."""

    def __init__(self, name: str, out: Path):
        self.name, self.folder = name, out / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.model, self.schedule = build(name), SCHEDULES[name]
        self.progress = Progress(stage=self.schedule.last_stage if self.schedule.start else 0)
        matrices = {
            n: p for n, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in n
        }
        rest = [p for n, p in self.model.named_parameters() if n not in matrices]
        self.muon = Muon(list(matrices.values()), lr=MUON_RATE)
        self.adam = torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0)
        if (self.folder / "state.pt").exists():
            self.load()

    def load(self) -> None:
        """Go back to the last checkpoint."""
        saved = torch.load(self.folder / "state.pt", weights_only=True)
        for part in ("model", "muon", "adam"):
            getattr(self, part).load_state_dict(saved[part])
        self.progress = Progress(**saved["progress"])

    def save(self) -> None:
        """Write a checkpoint, whole or not at all."""
        parts = {part: getattr(self, part).state_dict() for part in ("model", "muon", "adam")}
        torch.save(parts | {"progress": asdict(self.progress)}, self.folder / "state.tmp")
        (self.folder / "state.tmp").rename(self.folder / "state.pt")

    def run(self, tokens: int) -> None:
        """Train until `tokens` have been read, logging and saving by the clock."""
        rng = Random(seed_of("train", self.name, self.progress.step))
        logged = saved = time.monotonic()
        begun = logged - self.progress.seconds
        with (self.folder / "log.jsonl").open("a") as log:
            while self.progress.tokens < tokens:
                self.step(rng, tokens)
                now = time.monotonic()
                self.progress.seconds = now - begun
                if now - logged > LOG_SECONDS:
                    print(json.dumps(self.progress.row()), file=log, flush=True)
                    logged = now
                if now - saved > SAVE_SECONDS:
                    self.save()
                    saved = now
            print(json.dumps(self.progress.row()), file=log, flush=True)
        self.save()

    def step(self, rng: Random, tokens: int) -> None:
        """Take one step on one batch."""
        progress = self.progress
        self.set_rates(progress.tokens / tokens)
        lessons = draw(rng, STAGES[progress.stage], self.schedule.batch)
        loss, hits = self.loss(lessons)
        self.model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.step()
        self.adam.step()
        progress.step, progress.tokens = (
            progress.step + 1,
            progress.tokens + lessons.ids[:, 1:].numel(),
        )
        progress.observe(loss.item(), lessons.kinds, hits)
        progress.advance(self.schedule.last_stage)

    def loss(self, lessons: Batch) -> tuple[torch.Tensor, list[bool]]:
        """Weigh the loss of a batch, and say which answers were right."""
        layer = self.schedule.owner_layer
        output = self.model(lessons.ids[:, :-1], use_cache=False, output_hidden_states=layer > 0)
        wanted, asked = lessons.ids[:, 1:], lessons.answers[:, 1:]  # (B, T)
        weight = torch.where(asked, ANSWER_WEIGHT, PROSE_WEIGHT) * (wanted != PAD)
        nats = F.cross_entropy(output.logits.flatten(0, 1), wanted.flatten(), reduction="none")
        loss = (nats.view_as(weight) * weight).sum() / weight.sum()
        if layer and len(lessons.owners):
            rows, positions, owners = lessons.owners.T
            halfway = self.model.model.norm(output.hidden_states[layer][rows, positions])
            loss = loss + OWNER_WEIGHT * F.cross_entropy(self.model.lm_head(halfway), owners)
        hits = output.logits.detach()[asked].argmax(-1) == wanted[asked]
        return loss, hits.tolist()

    def set_rates(self, part: float) -> None:
        """Warm up over a hundred steps; fall linearly over the last part of the run."""
        factor = min(1.0, (self.progress.step + 1) / 100)
        factor *= self.schedule.rate * min(1.0, max(0.02, (1 - part) / self.schedule.cooling))
        self.muon.param_groups[0]["lr"] = MUON_RATE * factor
        self.adam.param_groups[0]["lr"] = ADAM_RATE * factor


def train(args: argparse.Namespace) -> None:
    """Train the named models one after the other."""
    torch.set_num_threads(args.threads)
    for name in args.names or MODELS:
        trainer = Trainer(name, args.out)
        if args.compile:
            for layer in trainer.model.model.layers:
                layer.compile()
        trainer.run(args.tokens or trainer.schedule.tokens)


def export(args: argparse.Namespace) -> None:
    """Write the trained models as bf16 checkpoints that transformers loads."""
    if not args.to and (own := set(args.names) - set(MODELS)):
        raise SystemExit(f"the package does not hold {', '.join(sorted(own))}; give --to FOLDER")
    for name in args.names or MODELS:
        folder = args.to / name if args.to else checkpoint_path(name)
        folder.mkdir(parents=True, exist_ok=True)
        model = Trainer(name, args.out).model.to(torch.bfloat16)
        model.save_pretrained(folder)
        save_tokenizer(folder)
        for file in folder.iterdir():
            file.chmod(0o644)
        print(folder)


def evaluate(args: argparse.Namespace) -> None:
    """Print the card's figures."""
    print(summary(measure(args.models)))


def card(args: argparse.Namespace) -> None:
    """Measure and write the card."""
    write_card(measure(args.models), args.out)


def everything(args: argparse.Namespace) -> None:
    """Train, export into the package and write the card."""
    for action in (train, export, card):
        action(args)


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    top = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.set_defaults(action=everything, out=RUNS, models=None, names=[], to=None)
    top.set_defaults(tokens=None, threads=1, compile=False)
    commands = top.add_subparsers()
    for action in (train, export, evaluate, card):
        command = commands.add_parser(action.__name__, help=action.__doc__)
        command.set_defaults(action=action)
        command.add_argument("--out", type=Path, default=RUNS, help="folder of the training runs")
        command.add_argument(
            "--models", type=Path, help="folder of exported models; default the packaged ones"
        )
        if action in (train, export):
            command.add_argument("names", nargs="*", help="default all three")
        if action is train:
            command.add_argument("--tokens", type=int, help="read in all; default the recipe's")
            command.add_argument("--threads", type=int, default=1)
            command.add_argument(
                "--compile", action="store_true", help="a third faster after half a minute"
            )
        if action is export:
            command.add_argument("--to", type=Path, help="default the package")
    return top


if __name__ == "__main__":
    arguments = parser().parse_args()
    arguments.action(arguments)
