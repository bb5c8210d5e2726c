"""The model card's sentences around its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvmap.demo import MODELS
from kvmap.demo.words import vocabulary

KINDS = ("all", "recall", "reverse", "two_hop", "latest", "compare")
MOVES = ("whole", "pronoun", "and")
SEEDS = ("0", "1", "2")
FACTS = ("layers", "width", "heads", "kv_heads", "theta", "seed", "parameters", "bytes")
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)


def find(
    card: dict[str, Any], model: str, tokens: int, kind: str = "all", seed: str = "pooled"
) -> dict[str, Any]:
    """Look up one accuracy; tokens 0 is without context, whose only seed is "0"."""
    wanted = {"model": model, "tokens": tokens, "kind": kind, "seed": seed if tokens else "0"}
    return next(row for row in card["accuracy"] if wanted.items() <= row.items())


def percent(figure: dict[str, Any]) -> str:
    """Say a rate and its interval in percent."""
    return f"{100 * figure['rate']:.1f} ({100 * figure['low']:.1f}–{100 * figure['high']:.1f})"


def grid(head: list[str], rows: list[list[str]]) -> str:
    """Lay out a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(card: dict[str, Any]) -> dict[str, str]:
    """Make every table of figures."""
    return {
        "kinds": _accuracy(card, "512 words", [(k, 512, k, "pooled") for k in KINDS]),
        "lengths": _accuracy(card, "words", [(str(n), n, "all", "pooled") for n in LENGTHS]),
        "kinds_long": _accuracy(card, "2048 words", [(k, 2048, k, "pooled") for k in KINDS]),
        "seeds": _accuracy(card, "512 words, seed", [(s, 512, "all", s) for s in SEEDS]),
        "other": _other(card),
    }


def _accuracy(card: dict[str, Any], title: str, lines: list[tuple[str, int, str, str]]) -> str:
    rows = [[label, *(percent(find(card, m, *where)) for m in MODELS)] for label, *where in lines]
    return grid([title, *MODELS], rows)


def _other(card: dict[str, Any]) -> str:
    models = card["models"]
    rows = [["right without the document, %", *(percent(find(card, m, 0)) for m in MODELS)]]
    for what, key in (("documents of 512 words", "documents"), ("prose alone", "prose")):
        values = (str(models[m][f"perplexity_{key}"]) for m in MODELS)
        rows.append([f"perplexity, {what}", *values])
    for move in MOVES:
        values = (percent(models[m]["conversation"][move]) for m in MODELS)
        rows.append([f"turns right, {move}, %", *values])
    return grid(["measure", *MODELS], rows)


def summary(card: dict[str, Any]) -> str:
    """Put all tables of figures one after the other, as `evaluate` prints them."""
    made = tables(card)
    return "\n\n".join(made[name] for name in ("kinds", "lengths", "kinds_long", "seeds", "other"))


def render(card: dict[str, Any]) -> str:
    """Write the card for people."""
    made = {"models": _models, "training": _training, "digests": _digests}
    filled = tables(card) | {name: make(card) for name, make in made.items()}
    template = (Path(__file__).parent / "card_template.md").read_text()
    return template.format(**filled, guess=card["guess"], vocabulary=len(vocabulary()))


def _models(card: dict[str, Any]) -> str:
    rows = [[k.replace("_", " "), *(str(card["models"][m][k]) for m in MODELS)] for k in FACTS]
    return grid(["", *MODELS], rows)


def _training(card: dict[str, Any]) -> str:
    rows = []
    for model in MODELS:
        done, plan = card["models"][model]["training"], card["models"][model]["schedule"]
        minutes = f"{done['seconds'] / 60:.0f}"
        rows.append(
            [
                model,
                f"{done['tokens'] / 1e6:.1f} M",
                str(done["step"]),
                minutes,
                str(plan["last_stage"]),
            ]
        )
    return grid(["", "words read", "steps", "minutes", "last stage"], rows)


def _digests(card: dict[str, Any]) -> str:
    return grid(
        ["", "sha256 of model.safetensors"],
        [[m, f"`{card['models'][m]['sha256']}`"] for m in MODELS],
    )
