"""Measure recipes beside each other: all arms, several calibration seeds, intervals.

    python examples/recipes.py tiny-m tiny-l                      # the table of docs/recipes.md
    python examples/recipes.py tiny-m tiny-l --only paper,kvmap --seeds 1 --json out.jsonl

Each recipe is fitted on the same calibrations and asked the same questions. A line of --json
is one recipe on one seed, written as it comes; what the file holds already is not run again.
"""

import argparse
import json
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch

from kvmap import fit, models, pipeline
from kvmap.collect_options import CollectOptions
from kvmap.collect_pair import Loading, TextOptions, collect_pair, read_text
from kvmap.evaluate.evaluation import EvaluateOptions, evaluate
from kvmap.fit import Recipe
from kvmap.fit.choice import select_layers
from kvmap.fit.job import splits
from kvmap.mapping import MapOptions


def variants() -> dict[str, Recipe]:
    """Return presets, each part added alone to `paper`, and each removed from `kvmap`."""
    best, plain = fit.recipe("kvmap"), fit.recipe("paper")
    without = lambda **changed: replace(best, options=replace(best.options, **changed))  # noqa: E731
    alone = lambda **changed: replace(plain, ridge="auto", options=MapOptions(**changed))  # noqa: E731
    weightless = replace(fit.recipe("cachebridge"), weights="none")
    return {
        **fit.RECIPES,
        "paper + λ held-out": alone(),
        "paper + λ + native head": alone(native_head=4),
        "paper + λ + exact layer 0": alone(exact_first=True),
        "paper + λ + joint": alone(joint=True),
        "paper + λ + anchor": alone(anchor=True),
        "paper + λ + tokens before": alone(lookback=3),
        "paper + λ + native tail": alone(native_tail=64),
        "kvmap - native head": without(native_head=0),
        "kvmap - exact layer 0": without(exact_first=False),
        "kvmap - joint": without(joint=False),
        "kvmap - anchor": without(anchor=False),
        "kvmap - tokens before": without(lookback=0),
        "kvmap - middle layer": without(lookback_layers=(0,)),
        "kvmap - native tail": without(native_tail=1),
        "kvmap - λ held-out": replace(best, ridge=1e-2),
        "kvmap - rank": replace(best, rank=None),
        "kvmap + row weights": replace(best, weights="attention"),
        "cachebridge - row weights": weightless,
    }


def measure(pair, recipe: Recipe, calibration, asked, seed: int) -> dict:
    """Fit a recipe, ask the questions, and return its figures."""
    openers = tuple(lambda model=model: model for model in pair)
    shapes = calibration.source.geometry, calibration.target.geometry
    recipe = replace(recipe, options=fit.with_assignment(recipe.options, *shapes))
    found = select_layers(splits(calibration, recipe.options.native_head), recipe)
    made = pipeline.fit_map(calibration, found.layers, recipe, lambda *_: None, openers)
    options = EvaluateOptions(
        tasks=("demo",), limit=asked.questions, lengths=(asked.length,), seed=seed, diagnosed=0
    )
    figures = evaluate(made.cmap, *pair, options).figures
    kept = ("arms", "retention", "gap_recovered", "margin_wrong_document", "intervals", "n")
    return {
        "k": found.k,
        "parameters": made.cmap.parameters,
        "fit_seconds": made.seconds,
        "r2": made.cmap.provenance["r2"]["held_out"],
        **{name: figures[name] for name in kept},
    }


def row(name: str, found: list[dict]) -> str:
    """Return a recipe's line: means over seeds, the intervals' mean ends in brackets."""
    arm = lambda name, measure: mean(one["arms"][name][measure] for one in found)  # noqa: E731
    cells = [
        f"{found[0]['k']}",
        f"{found[0]['parameters'] / 1e3:,.0f}",
        f"{mean(one['r2']['key'] for one in found):.3f} / "
        f"{mean(one['r2']['value'] for one in found):.3f}",
        f"{arm('mapped', 'accuracy'):.3f}",
        ratio(found, "retention"),
        ratio(found, "gap_recovered"),
        f"{arm('mapped', 'kl'):.4f}",
        f"{arm('mapped', 'top1'):.3f}",
        f"{arm('wrong_document', 'accuracy'):.3f}",
    ]
    return f"| {name} | " + " | ".join(cells) + " |"


def ratio(found: list[dict], name: str) -> str:
    """Return a ratio's mean over seeds with the mean ends of its intervals; a dash if undefined."""
    known = [one for one in found if one[name] is not None]
    if not known:
        return "-"
    ends = [mean(one["intervals"][name][end] for one in known) for end in (0, 1)]
    return f"{mean(one[name] for one in known):.3f} [{ends[0]:.3f}, {ends[1]:.3f}]"


HEAD = """| recipe | k | weights, thousands | held-out R² K / V | accuracy | retention | \
gap recovered | KL, nats | top-1 | wrong document |
|---|---|---|---|---|---|---|---|---|---|"""


def arms_line(found: list[dict]) -> str:
    """Return the arms that no recipe changes."""
    names = ("native", "source", "raw_copy", "random_map", "zero", "no_context")
    shown = []
    for name in names:
        known = [one["arms"][name] for one in found]
        if all(arm and arm["accuracy"] is not None for arm in known):
            shown.append(f"{name} {mean(arm['accuracy'] for arm in known):.3f}")
    return ", ".join(shown)


def report(names: list[str], done: dict, asked: argparse.Namespace) -> str:
    """Return the table, what made it, and the arms without a map."""
    seeds = range(asked.seeds)
    rows = [row(name, [done[name, seed] for seed in seeds]) for name in names]
    made = (
        f"{asked.source} → {asked.target}, {asked.seeds} calibrations of {asked.sequences} "
        f"sequences of {asked.length} tokens, every {asked.stride}th kept; "
        f"{asked.questions} questions about documents of {asked.length} tokens."
    )
    without = f"Without a map: {arms_line([done[names[0], seed] for seed in seeds])}."
    return "\n".join((made, "", HEAD, *rows, "", without))


def place(path: Path, text: str) -> None:
    """Put the report between the marks of a document."""
    before, begin, rest = path.read_text().partition("<!-- recipes:begin -->\n")
    _, end, after = rest.partition("<!-- recipes:end -->")
    path.write_text(before + begin + text + "\n" + end + after)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--only", help="recipes, joined by commas; all if not given")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=120)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--stride", type=int, default=2)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--json", type=Path, help="file of lines, one per recipe and seed")
    parser.add_argument("--write", type=Path, help="document to put the table into")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    recipes = variants()
    names = asked.only.split(",") if asked.only else list(recipes)
    done = {}
    if asked.json and asked.json.exists():
        lines = [json.loads(line) for line in asked.json.read_text().splitlines()]
        done = {(line["recipe"], line["seed"]): line for line in lines}
    both = (asked.source, asked.target)
    pair = tuple(models.load(name) for name in both)
    for seed in range(asked.seeds):
        missing = [name for name in names if (name, seed) not in done]
        if not missing:
            continue
        text = TextOptions("demo", sequences=asked.sequences, length=asked.length, seed=seed)
        options = CollectOptions(stride=asked.stride, heads="all", joint=True, shard=16)
        calibration, _ = collect_pair(
            both, read_text(both, text, Loading()), options, None, Loading(), lambda *_: None
        )
        for name in missing:
            figures = measure(pair, recipes[name], calibration, asked, seed)
            done[name, seed] = {"recipe": name, "seed": seed, **figures}
            print(row(name, [done[name, seed]]), file=sys.stderr, flush=True)
            if asked.json:
                with asked.json.open("a") as file:
                    file.write(json.dumps(done[name, seed]) + "\n")
    text = report(names, done, asked)
    print(text)
    if asked.write:
        place(asked.write, text)


if __name__ == "__main__":
    main()
