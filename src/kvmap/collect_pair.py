"""From the names of two models to a calibration; one that is there already is reused."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kvmap import atomic, demo, models, plan, text
from kvmap.calibration import Calibration
from kvmap.collect import collect
from kvmap.collect_options import CollectOptions
from kvmap.errors import KvmapError, UsageError
from kvmap.fit import Recipe
from kvmap.geometry import Geometry
from kvmap.layers import are_layers_of
from kvmap.models import LoadedModel
from kvmap.models.configs import load_config, parameter_count, shape_of
from kvmap.models.devices import SHARDED, pick_device, pick_dtype
from kvmap.models.load import identify, load_tokenizer
from kvmap.pipeline import (
    Text,
    cache_folder,
    calibration_path,
    open_finished,
)
from kvmap.ranks import ranks

Progress = Callable[[str, int, int], None]

# What is held of a token while token ids are written down: Python's own numbers, in lists.
TOKEN_BYTES = 64


@dataclass(frozen=True)
class Loading:
    """How models are loaded."""

    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False

    def open(self, name: str) -> LoadedModel:
        """Load a model by name."""
        return models.load(name, self.device, self.dtype, self.trust_remote_code)

    @property
    def dtype_name(self) -> str:
        """Return the name of the dtype that "auto" stands for here."""
        return str(pick_dtype(self.dtype, pick_device(self.device))).removeprefix("torch.")


@dataclass(frozen=True)
class TextOptions:
    """Which text both models read; `dataset` None takes the demo's for the embedded models."""

    dataset: str | None = None
    split: str = "train"
    sequences: int = 500
    length: int = 1024
    seed: int = 0


def read_text(
    names: tuple[str, str],
    options: TextOptions,
    loading: Loading,
    note: Callable[[str], None] = lambda text: None,
) -> Text:
    """Read and tokenise calibration text with the source's tokenizer.

    Args:
        note: Takes a remark on the text.

    Raises:
        UsageError: The data set or tokenizer cannot be read, there is too little text, or a
            model reads no sequences of this length.
    """
    dataset = options.dataset or default_dataset(names)
    require_length(names, geometries(names, loading), options.length)
    tokenizer = load_tokenizer(models.resolve(names[0]), loading.trust_remote_code)
    reached: list[Path] = []
    found = text.documents(
        dataset, options.split, tokenizer, options.length, options.seed, reached.append
    )
    token_ids = text.token_sequences(found, tokenizer, options.length, options.sequences)
    if remark := text.unknown_remark(token_ids, tokenizer):
        note(remark)
    label = Path(dataset).name if os.path.exists(dataset) else dataset
    files = sorted(set(text.beginnings(reached).values()))
    record = {"dataset": label, "split": options.split, "seed": options.seed, "files": files}
    return Text(token_ids, record)


def require_room(
    names: tuple[str, str],
    text: TextOptions,
    options: CollectOptions,
    out: Path | None,
    loading: Loading,
) -> None:
    """Check that token ids fit in memory, and what is kept on the disk, before text is read.

    Args:
        options: With the scope filled in.

    Raises:
        KvmapError: They do not, whatever of a run before is there.
        UsageError: A model reads no sequences of this length, however little they take.
    """
    require_length(names, geometries(names, loading), text.length)
    asked = f"{text.sequences} sequences of {text.length} tokens"
    tokens, free = text.sequences * text.length, plan.free_memory("cpu")
    if tokens * TOKEN_BYTES > free:
        raise KvmapError(
            f"the token ids of {asked} would take {tokens * TOKEN_BYTES / 1e9:.2f} GB of memory, "
            f"{free / 1e9:.2f} GB are free here; give fewer --sequences"
        )
    needed = 4 * tokens + _kept_bytes(names, text, options, loading)
    where = out or cache_folder() / "calibrations"
    if needed > (room := _disk_room(where)):
        raise KvmapError(
            f"{where}: {asked} would take {needed / 1e9:.2f} GB there, {room / 1e9:.2f} GB are "
            "free; give fewer --sequences, a larger --stride, or collect with --no-dump"
        )


def _kept_bytes(
    names: tuple[str, str], text: TextOptions, options: CollectOptions, loading: Loading
) -> int:
    """Return the bytes of rows and moments that are on the disk at the end of a run at least."""
    shapes, place = geometries(names, loading), _place(loading)
    # Of models that do not fit side by side the rows of one wait there for the other's.
    waits = options.dump or not plan.fits_together(_weight_bytes(names, loading), place)
    first = min(options.native_head, text.length)
    kept = [
        plan.dump_bytes(
            *shapes, options, (text.sequences, tokens), pick_dtype(loading.dtype, place).itemsize
        )
        for tokens in (text.length * waits, first * options.moments)
    ]
    # Those that do not fit in memory are refused, or made of few layers in a second pass.
    fits = options.moments and plan.too_large(*shapes, options) is None
    return sum(kept) + fits * plan.moments_bytes(*shapes, options.scope)


def _disk_room(where: Path) -> int:
    """Return the bytes that a folder may come to: what is free, and what is in it already."""
    held = 0
    for folder, _, files in os.walk(where):
        for file in files:
            with suppress(OSError):  # another process has taken it away
                held += os.lstat(os.path.join(folder, file)).st_size
    return plan.free_disk(where) + held


def _place(loading: Loading) -> str:
    """Return the device of a loading, before the processes that share a model have met too."""
    return SHARDED if loading.device == SHARDED else pick_device(loading.device)


def require_length(names: tuple[str, str], shapes: tuple[Geometry, Geometry], length: int) -> None:
    """Check that both models read sequences of a length.

    Raises:
        UsageError: One does not.
    """
    for name, shape in zip(names, shapes, strict=True):
        shape.require_positions(name, length, "--length", "give a smaller one")


def default_dataset(names: tuple[str, str]) -> str:
    """Return the data set that suits a pair: the demo's for embedded models, else web text."""
    return "demo" if all(name in demo.MODELS for name in names) else "fineweb-edu"


def geometries(names: tuple[str, str], loading: Loading) -> tuple[Geometry, Geometry]:
    """Return both cache shapes from configs alone, without RoPE tables."""
    return tuple(
        shape_of(load_config(models.resolve(name), loading.trust_remote_code)) for name in names
    )


def with_scope(
    options: CollectOptions, shapes: tuple[Geometry, Geometry], recipe: Recipe | None = None
) -> CollectOptions:
    """Fill in which moments are kept: what fits in memory, and what the recipe reads at least.

    Raises:
        UsageError: The layers of the tokens before are not the source's.
    """
    scope = plan.moments_scope(*shapes, options.layers)
    scope = scope if recipe is None else plan.scope_for(recipe, scope)
    late = options.lookback_layers or scope.lookback_layers
    if late[-1] >= shapes[0].layers:
        raise UsageError(
            f"found layer {late[-1]} of the tokens before, but the source has "
            f"{shapes[0].layers} layers; give --lookback-layers below that"
        )
    return replace(
        options,
        heads=scope.heads if options.heads == "auto" else options.heads,
        joint=scope.joint if options.joint is None else options.joint,
        lookback_layers=late,
    )


def collect_pair(
    names: tuple[str, str],
    found: Text,
    options: CollectOptions,
    out: Path | None,
    loading: Loading,
    progress: Progress,
    force: bool = False,
) -> tuple[Calibration, bool]:
    """Return a pair's calibration and whether it was there already.

    Args:
        out: Folder to fill; None takes the one in the cache folder, if it is there.
        force: Replace the calibration that is in `out`.
    """
    with ranks(loading.device == SHARDED) as team:
        path = out or cached_path(names, found, options, loading)
        if out is None and path is not None and (finished := open_finished(path)):
            return finished, True
        _check_memory(geometries(names, loading), options)
        loaded: dict[str, LoadedModel] = {}
        together = plan.fits_together(_weight_bytes(names, loading), pick_device(loading.device))

        def opener(name: str) -> Callable[[], LoadedModel]:
            return lambda: loaded.get(name) or loading.open(name)

        if path is None:
            loaded = {name: loading.open(name) for name in names}
            digests = tuple(loaded[name].signature.digest for name in names)
            path = calibration_path(digests, (loading.dtype_name,) * 2, found, options)
        atomic.make_folder(path.parent)
        openers = tuple(opener(name) for name in names)
        with nullcontext() if out is not None or team.count > 1 else atomic.alone(path):
            if out is None and (finished := open_finished(path)):
                return finished, True
            made = collect(
                openers,
                found.token_ids,
                path,
                options,
                found.record,
                progress,
                together,
                force if out is not None else None,
                team,
            )
        return made, False


def _check_memory(shapes: tuple[Geometry, Geometry], options: CollectOptions) -> None:
    """Check that moments fit in memory and that chosen layers are the pair's, before any work.

    Raises:
        UsageError: Saying what to do instead.
    """
    check_layers(shapes, options.layers)
    if problem := plan.too_large(*shapes, options):
        raise UsageError(problem)


def check_layers(
    shapes: tuple[Geometry, Geometry], layers: tuple[tuple[int, ...], ...] | None
) -> None:
    """Check that a choice of layers is of a pair.

    Raises:
        UsageError: It is of another one.
    """
    source, target = shapes
    if layers is not None and not are_layers_of(layers, source, target):
        raise UsageError(
            f"found --layers of {len(layers)} target layers, expected {target.layers} that read "
            f"source layers below {source.layers}; choose them for this pair"
        )


def _weight_bytes(names: tuple[str, str], loading: Loading) -> tuple[int, int]:
    itemsize = pick_dtype(loading.dtype, _place(loading)).itemsize
    configs = [load_config(models.resolve(name), loading.trust_remote_code) for name in names]
    counts = (parameter_count(config, loading.trust_remote_code) for config in configs)
    return tuple(count * itemsize for count in counts)


def cached_path(
    names: tuple[str, str], found: Text, options: CollectOptions, loading: Loading
) -> Path | None:
    """Return where a pair's calibration is cached; None where weights must be loaded to know."""
    digests = tuple(identify(name, loading.trust_remote_code) for name in names)
    if None in digests:
        return None
    return calibration_path(digests, (loading.dtype_name,) * 2, found, options)
