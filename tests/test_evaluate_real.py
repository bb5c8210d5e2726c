"""SmolLM2-135M mapped to itself answers the harness as the harness's own `hf` model does.

Runs where lm-eval is, with `KVMAP_TEST_MODEL` naming a checkpoint and `KVMAP_TEST_ITEMS` how many
rows of each task are asked (2 if it does not say).
"""

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the extra `eval`")

from kvmap.evaluate import arms, runner
from kvmap.evaluate.harness import engine as engines
from kvmap.evaluate.harness import judge, local
from kvmap.evaluate.tasks import TASKS, TaskOptions
from kvmap.mapping import Affine, CacheMap, LayerMap, MapOptions
from kvmap.models import load

MODEL = os.environ.get("KVMAP_TEST_MODEL", "")
ITEMS = int(os.environ.get("KVMAP_TEST_ITEMS", "2"))
SHARED = Path(__file__).parents[2] / "shared" / "data"
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not MODEL, reason="KVMAP_TEST_MODEL names no checkpoint"),
    pytest.mark.skipif(not SHARED.is_dir(), reason="real rows are not here"),
]


@pytest.fixture(scope="module")
def pair():
    """A model beside itself under the identity map."""
    model = load(MODEL, device="cpu", dtype="float32")
    width = model.signature.geometry.width
    same = Affine(torch.eye(width)[None], torch.zeros(1, width))
    layers = tuple(
        LayerMap((layer,), same, same) for layer in range(model.signature.geometry.layers)
    )
    cmap = CacheMap(model.signature, model.signature, layers, MapOptions())
    return arms.Pair(cmap, model, model, cmap, cmap)


def _samples(model, name, few_shot):
    tasks = judge.load(local.specifications(name, SHARED))
    for task in tasks if name == "gsm8k" else ():
        task.set_config(key="generation_kwargs", value={"max_gen_toks": 32}, update=True)
    return judge.samples_of(model, tasks, ITEMS, few_shot)


def _answers(sample):
    """Return a sample's greedy text, or its log-likelihoods in nats."""
    return [r[0] if isinstance(r[0], str) else float(r[0][0]) for r in sample["resps"]]


@pytest.mark.parametrize("name", ["arc_easy", "hellaswag", "piqa", "gsm8k"])
def test_identity_map_answers_as_the_harness_s_own_model(pair, name):
    """Sums over tens of tokens in float32: nats agree to 5e-3, accuracies and texts are equal."""
    from lm_eval.models.huggingface import HFLM

    from kvmap.evaluate.harness.model import KvmapModel

    few_shot = 1 if name == "gsm8k" else 0
    hf = HFLM(pretrained=pair.target.model, tokenizer=pair.target.tokenizer, batch_size=1)
    own = _samples(hf, name, few_shot)
    engine = engines.Engine(pair, ("native", "mapped"), lambda done, total: None)
    for arm in engine.arms:
        found = _samples(KvmapModel(engine, arm), name, few_shot)
        assert list(found) == list(own)
        for key, sample in own.items():
            if name == "gsm8k":
                assert _answers(found[key]) == _answers(sample)
            else:
                assert _answers(found[key]) == pytest.approx(_answers(sample), abs=5e-3)
                assert judge._accuracy(found[key]) == judge._accuracy(sample)


def test_identity_map_has_the_model_s_own_nats_on_wikitext(pair):
    """Beside the model's plain forward pass over the whole chunk."""
    options = TaskOptions(pair.target.tokenizer, limit=ITEMS, lengths=(512,), data=SHARED)
    task = TASKS["wikitext2"](options)
    scores = runner.run_task(pair, task, arms=("native", "mapped"))
    plain = torch.cat([_nats(pair.target.model, item) for item in task.items])
    for arm in scores.arms:
        found = scores.column("nll", arm)
        assert found.mean().item() == pytest.approx(plain.mean().item(), abs=1e-3)
        assert torch.allclose(found, plain, atol=1e-3)


@torch.no_grad()
def _nats(model, item):
    probe = item.probes[0]
    ids = torch.tensor([item.context + probe.prompt + probe.answer])
    logits = model(input_ids=ids).logits[0].float().log_softmax(-1)
    gold = torch.tensor(probe.answer)
    return -logits[-len(gold) - 1 : -1].gather(1, gold[:, None])[:, 0]
