"""The evaluation on the embedded pair: what a map that carries content is told apart from."""

import json
from pathlib import Path

import pytest
import torch

from kvmap import fit, models, pipeline
from kvmap.collect import collect
from kvmap.collect_options import CollectOptions
from kvmap.evaluate.tasks import TASKS, TaskOptions

NAMES = ("tiny-m", "tiny-l")
pytestmark = pytest.mark.skipif(
    not all((Path(models.resolve(name).location) / "model.safetensors").exists() for name in NAMES),
    reason="the embedded models are not here",
)
SEQUENCES, TOKENS, BATCH = 48, 256, 8


def other_document(_, arguments, keywords):
    """Let a model read the next sequence of the batch in place of each."""
    return arguments, keywords | {"input_ids": keywords["input_ids"].roll(1, 0)}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Return the paths of two maps of the recipe `paper`: of right pairs of caches, and of wrong.

    For the second the target has read another document than the source, of equal length, so
    that rows are mismatched and its outputs are the average document's.
    """
    folder = tmp_path_factory.mktemp("embedded")
    pair = tuple(models.load(name, device="cpu") for name in NAMES)
    texts = TASKS["text"](TaskOptions(pair[0].tokenizer, SEQUENCES, (TOKENS,), seed=7))
    ids = torch.tensor([(i.context + i.probes[0].prompt + i.probes[0].answer) for i in texts.items])
    options = CollectOptions(
        stride=1, heads="all", joint=False, dump=False, batch=BATCH, held_out=1 / 6
    )
    recipe = fit.recipe("paper")
    for name in ("right", "mismatched"):
        hook = None
        if name == "mismatched":
            hook = pair[1].model.register_forward_pre_hook(other_document, with_kwargs=True)
        try:
            made = collect(
                tuple(lambda model=model: model for model in pair),
                ids,
                folder / f"{name}.calib",
                options,
                {},
            )
        finally:
            if hook is not None:
                hook.remove()
        layers = ((0, 1, 2),) * pair[1].signature.geometry.layers
        cmap = pipeline.fit_map(made, layers, recipe, lambda *_: None).cmap
        cmap.save(folder / f"{name}.map")
    return folder


ASKED = ("--tasks", "demo", "--length", "128", "--limit", "60", "--diagnosed", "1", "--json")


def test_a_map_fitted_on_mismatched_documents_is_content_free(fitted, kvmap_run):
    code, out, error = kvmap_run("eval", fitted / "mismatched.map", *ASKED, "--sign")
    figures = json.loads(out)
    assert code == 3
    assert figures["verdict"] == "content-free"
    assert "content-free: another document's cache does as well" in error
    asked = ("transfer", fitted / "mismatched.map", "--prompt", "here is a story .")
    code, _, error = kvmap_run(*asked, "--generate", "1", "--require-evidence")
    assert code == 2
    assert "its evidence says 'content-free', expected 'recovers'" in error


def test_a_right_map_stands_above_every_control_and_they_near_no_context(fitted, kvmap_run):
    code, out, _ = kvmap_run("eval", fitted / "right.map", *ASKED)
    figures = json.loads(out)
    right = {arm: found["accuracy"] for arm, found in figures["arms"].items()}
    assert len(right) == 8
    assert code == 0
    assert figures["verdict"] in ("recovers", "no better than source", "worse than source")
    for control in ("wrong_document", "zero", "random_map"):
        assert right[control] == pytest.approx(right["no_context"], abs=0.15)
        assert right["mapped"] > right[control] + 0.2
