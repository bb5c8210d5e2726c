"""Fixtures for the whole suite: offline, one thread, session-wide and read-only."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

from collections.abc import Callable
from pathlib import Path

import checkpoints
import planted
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from kvmap.calibration import Calibration
from kvmap.collect import collect
from kvmap.collect_options import CollectOptions
from kvmap.models import LoadedModel, load

torch.set_num_threads(1)
logging.disable_progress_bar()
logging.set_verbosity_error()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[[str], Path]:
    """Return the folder of a named tiny checkpoint, built when first asked for."""
    folder, built = tmp_path_factory.mktemp("checkpoints"), {}

    def get(name: str) -> Path:
        if name not in built:
            built[name] = checkpoints.BUILDERS[name](folder / name)
        return built[name]

    return get


@pytest.fixture(scope="session")
def native(checkpoint) -> Callable[[str], PreTrainedModel]:
    """Return a named tiny model as transformers itself loads it, in fp32."""
    loaded = {}

    def get(name: str) -> PreTrainedModel:
        if name not in loaded:
            loaded[name] = AutoModelForCausalLM.from_pretrained(
                checkpoint(name), dtype=torch.float32
            ).eval()
        return loaded[name]

    return get


@pytest.fixture(scope="session")
def loaded(checkpoint) -> Callable[..., LoadedModel]:
    """Return a named tiny model as kvmap loads it, on the CPU."""
    models = {}

    def get(name: str, dtype: str = "float32") -> LoadedModel:
        if (name, dtype) not in models:
            models[name, dtype] = load(str(checkpoint(name)), device="cpu", dtype=dtype)
        return models[name, dtype]

    return get


PLANTED = {
    "twin_llama": lambda: planted.twin("llama", 11),
    "twin_qwen3": lambda: planted.twin("qwen3", 12),
    "image": lambda: planted.image(13),
    "noisy_image": lambda: planted.image(14, key_noise=0.4),
}


@pytest.fixture(scope="session")
def plant() -> Callable[[str], planted.Planted]:
    """Return a planted pair by name, in memory."""
    made = {}

    def get(name: str) -> planted.Planted:
        if name not in made:
            made[name] = PLANTED[name]()
        return made[name]

    return get


@pytest.fixture(scope="session")
def planted_paths(plant, tmp_path_factory) -> Callable[[str], tuple[Path, Path]]:
    """Return the folders (source, target) of a planted pair."""
    folder, saved = tmp_path_factory.mktemp("planted"), {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in saved:
            pair = plant(name)
            saved[name] = (
                checkpoints.save(pair.source, folder / f"{name}-source"),
                checkpoints.save(pair.target, folder / f"{name}-target"),
            )
        return saved[name]

    return get


@pytest.fixture(scope="session")
def pair(planted_paths) -> Callable[[str], tuple[LoadedModel, LoadedModel]]:
    """Return the loaded (source, target) of a planted pair."""
    opened = {}

    def get(name: str) -> tuple[LoadedModel, LoadedModel]:
        if name not in opened:
            opened[name] = tuple(load(str(path), device="cpu") for path in planted_paths(name))
        return opened[name]

    return get


@pytest.fixture(scope="session")
def calibration(pair, tmp_path_factory) -> Callable[[str], Calibration]:
    """Return a calibration of a planted pair: 64 sequences of 64 tokens, every token kept."""
    made = {}

    def get(name: str) -> Calibration:
        if name not in made:
            openers = tuple(lambda model=model: model for model in pair(name))
            folder = tmp_path_factory.mktemp(name) / "calibration"
            options = CollectOptions(
                stride=1, heads="all", joint=True, dump=False, shard=64, batch=16
            )
            ids = token_ids(64, 64, seed=1)
            made[name] = collect(openers, ids, folder, options, {"dataset": "random"})
        return made[name]

    return get


def token_ids(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Draw ordinary tokens [batch, tokens], none of them special."""
    generator = torch.Generator().manual_seed(seed)
    low = len(checkpoints.SPECIAL_TOKENS)
    return torch.randint(low, checkpoints.VOCABULARY, (batch, tokens), generator=generator)


@pytest.fixture
def kvmap_run(capsys, monkeypatch, tmp_path):
    """Run a command line in this process; return its exit code, stdout and stderr."""
    monkeypatch.setenv("KVMAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KVMAP_DEBUG", raising=False)

    from kvmap.cli import app as command

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            command.main([str(argument) for argument in arguments])
        return stop.value.code, *capsys.readouterr()

    return run
