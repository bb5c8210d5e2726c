"""From what was typed to what the library takes; what was not typed keeps the library's default."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvmap.cli.options import MOST
from kvmap.errors import UsageError

if TYPE_CHECKING:
    from kvmap.cli.output import Output
    from kvmap.fit import Recipe
    from kvmap.geometry import Geometry

T = TypeVar("T")


def given(kind: type[T], **asked: Any) -> T:
    """Make a library's options of those that were asked for; None was not."""
    return kind(**_asked(asked))


def edited_recipe(name: str | None, changes: dict[str, Any], options: dict[str, Any]) -> Recipe:
    """Return a preset with what was asked for otherwise.

    Args:
        changes: The recipe's own fields, such as k.
        options: Fields of the map's options, such as heads.
    """
    from kvmap.fit import DEFAULT_RECIPE, recipe

    preset = recipe(name or DEFAULT_RECIPE)
    asked = replace(preset.options, **_asked(options))
    made = replace(preset, options=asked, **_asked(changes))
    return replace(made, rank=made.rank or None)


def count_or_auto(name: str, text: str | None) -> int | str | None:
    """Read a count, or the word "auto".

    Raises:
        UsageError: It is neither.
    """
    if text is None or text == "auto":
        return text
    if not text.isdecimal() or not 1 <= int(text[:10]) < 10**9:
        raise UsageError(f"found {name} {text!r}, expected a number from 1, or auto")
    return int(text)


def check_count(
    out: Output, asked: str | None, recipe: Recipe, source: Geometry, name: str
) -> None:
    """Refuse a k beyond the source's layers if it was asked for; say so of a preset's.

    Raises:
        UsageError: It was asked for.
    """
    from kvmap.fit.recipes import require_layers

    if recipe.k == "auto":
        return
    if asked is not None:
        require_layers(recipe.k, source, name)
    if recipe.k > source.layers:
        out.note(f"k = {recipe.k} is capped at the source's {source.layers} layers")


def ridge_or_auto(text: str | None) -> float | str | None:
    """Read a relative ridge, or the word "auto".

    Raises:
        UsageError: It is neither.
    """
    if text is None or text == "auto":
        return text
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"found --ridge {text!r}, expected a number from 0, or auto")
    return value


def rank_or_share(text: str | None) -> float | None:
    """Read a rank, or the share by which it may let the error grow; 0 for whole weights.

    Raises:
        UsageError: It is neither.
    """
    if text is None:
        return None
    if text == "full":
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 10**9 or (value >= 1 and value != int(value)):
        raise UsageError(f"found --rank {text!r}, expected a number from 1, a share or full")
    return int(value) if value >= 1 else value


def numbers_or_none(text: str | None) -> tuple[int, ...] | None:
    """Read numbers of heads or layers joined by commas; None where the text is something else."""
    parts = (text or "").split(",")
    return tuple(map(int, parts)) if all(p.isdecimal() and len(p) < 6 for p in parts) else None


def layers_or_none(name: str, text: str | None) -> tuple[int, ...] | None:
    """Read numbers of layers joined by commas, and put them in order.

    Raises:
        UsageError: They are no numbers.
    """
    if text is None:
        return None
    found = numbers_or_none(text)
    if found is None:
        raise UsageError(f"found {name} {text!r}, expected numbers of layers joined by commas")
    return tuple(sorted(set(found)))


def share_or_milliseconds(text: str) -> tuple[float, str]:
    """Read a budget: a number and its unit, "share" or "ms".

    Raises:
        UsageError: It is neither.
    """
    unit = "ms" if text.endswith("ms") else "share"
    try:
        value = float(text.removesuffix("ms"))
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise UsageError(f"found --budget {text!r}, expected a share such as 0.1, or 5ms")
    return value, unit


def at_least(name: str, value: int | None, least: int) -> int | None:
    """Check a number.

    Raises:
        UsageError: It is too small, or larger than any count.
    """
    if value is not None and value < least:
        raise UsageError(f"found {name} {value}, expected at least {least}")
    return between(name, value, least, MOST)


def one_of(name: str, text: str | None, *known: str) -> str | None:
    """Check a choice that the library takes as a word.

    Raises:
        UsageError: It is none of the known ones.
    """
    if text is not None and text not in known:
        raise UsageError(f"found {name} {text!r}, expected {' or '.join(known)}")
    return text


def _asked(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def refuse_inputs(output: Path | None, *read: Path | None) -> None:
    """Refuse to write over a file that the command reads, even by force.

    Raises:
        UsageError: It is one of them.
    """
    for path in filter(None, read):
        if output is not None and path.resolve() == output.resolve():
            raise UsageError(f"{output}: is what is read; choose another path with --output")


def between(name: str, value: int | None, least: int, most: int) -> int | None:
    """Check a number.

    Raises:
        UsageError: It is out of range.
    """
    if value is not None and not least <= value <= most:
        raise UsageError(f"found {name} {value}, expected {least} to {most}")
    return value
