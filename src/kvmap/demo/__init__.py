"""A demo that needs no hub: a world to read and ask about, and three models trained on it."""

from pathlib import Path

MODELS = ("tiny-s", "tiny-m", "tiny-l")


def checkpoint_path(name: str) -> Path:
    """Find a model's checkpoint folder inside the package.

    Raises:
        KeyError: if there is no such model.
    """
    if name not in MODELS:
        raise KeyError(f"demo model: found {name!r}, expected one of {', '.join(MODELS)}")
    return Path(__file__).parent / "checkpoints" / name
