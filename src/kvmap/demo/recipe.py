"""What the models are, and the curriculum they learn by: three in the package, and two beside.

A stage asks some kinds of question about stories of some sizes, at some
lengths; a model moves on when it answers every kind of its stage. All models
start with heads in their first layer that look a few words back: see `look_back`.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvmap.demo import checkpoint_path
from kvmap.demo.lessons import SIZES, lesson
from kvmap.demo.questions import KINDS
from kvmap.demo.tokens import word_ids

PAD = 1
IDS = word_ids()


@dataclass(frozen=True)
class Shape:
    """What differs between the models, and the seed of their start."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    theta: float
    seed: int


SHAPES = {
    "tiny-s": Shape(width=64, layers=2, heads=4, kv_heads=2, theta=10_000.0, seed=11),
    "tiny-m": Shape(width=96, layers=3, heads=4, kv_heads=4, theta=20_000.0, seed=22),
    "tiny-l": Shape(width=128, layers=5, heads=8, kv_heads=4, theta=100_000.0, seed=33),
    "tiny-deep": Shape(width=96, layers=8, heads=8, kv_heads=8, theta=500_000.0, seed=44),
}


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum.

    Attributes:
        sizes: of stories, as in `lessons.SIZES`; a size too large for a length is passed over.
        asking: range of the share of room given to questions; prose takes the rest.
        talk: share of lessons that end in a conversation.
    """

    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    asking: tuple[float, float]
    talk: float = 0.0


STAGES = (
    Stage(("recall",), (0,), (192,), (0.9, 1.0)),
    Stage(("recall", "reverse"), (0, 1), (192,), (0.8, 1.0)),
    Stage(("recall", "reverse", "latest", "compare"), (0, 1, 2), (192,), (0.6, 1.0)),
    Stage(KINDS, (0, 1, 2), (192,), (0.5, 1.0)),
    Stage(KINDS, (1, 2, 3), (256,), (0.3, 0.9), 0.15),
    Stage(KINDS, (1, 2, 3, 3, 4, 5), (256, 256, 512), (0.1, 0.8), 0.2),
    Stage(KINDS, (2, 3, 3, 4, 5, 5), (256, 512, 512, 1024, 2048), (0.05, 0.7), 0.2),
    Stage(KINDS, (2, 3, 3, 4, 5, 5), (256, 512, 512, 1024, 2048, 4096), (0.05, 0.7), 0.2),
)
PASSED = 0.85
ROOM = {0: 90, 1: 60, 2: 120, 3: 200, 4: 240, 5: 300}  # words a lesson of a size needs at least


@dataclass(frozen=True)
class Schedule:
    """How long a model learns.

    Attributes:
        last_stage: of the curriculum, beyond which this model does not go.
        cooling: last part of the run over which rates fall to nothing.
        owner_layer: layers after which the owner of a thing asked about should be known;
            0 leaves that to the model. It is what makes two-hop questions learnable soon.
        rate: share of the usual learning rates.
        start: model of the package whose weights this one begins with, at its last stage.
    """

    tokens: int
    last_stage: int
    cooling: float
    owner_layer: int = 0
    batch: int = 2048
    rate: float = 1.0
    start: str = ""


SCHEDULES = {
    "tiny-s": Schedule(tokens=2_400_000, last_stage=3, cooling=0.4),
    "tiny-m": Schedule(tokens=2_400_000, last_stage=3, cooling=0.4),
    "tiny-l": Schedule(tokens=4_600_000, last_stage=6, cooling=0.3, owner_layer=3),
    "tiny-deep": Schedule(tokens=4_200_000, last_stage=7, cooling=0.3, owner_layer=4),
    "tiny-long": Schedule(
        tokens=2_000_000, last_stage=7, cooling=0.8, owner_layer=3, rate=0.3, start="tiny-l"
    ),
}


def build(name: str) -> Qwen3ForCausalLM:
    """Make a model as it is before its training."""
    if start := SCHEDULES[name].start:
        return Qwen3ForCausalLM.from_pretrained(checkpoint_path(start), dtype=torch.float32)
    shape = SHAPES[name]
    torch.manual_seed(shape.seed)
    config = Qwen3Config(
        vocab_size=len(IDS),
        hidden_size=shape.width,
        intermediate_size=2 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": shape.theta},
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=2,
        eos_token_id=3,
    )
    model = Qwen3ForCausalLM(config)
    look_back(model, shape.theta)
    return model


@torch.no_grad()
def look_back(model: Qwen3ForCausalLM, theta: float) -> None:
    """Start the first layer with heads that look one, two and three words back.

    A head of plane angles θ scores a word n back by Σ cos((n - o)θ) when its key
    is its query turned by oθ, largest at n = o; both come from feature 0, which
    every word shares. With these heads, induction (find where this was said, say
    what followed) is learnt in some hundred steps; from a random start it had not
    come after a thousand. All else starts at random, and everything trains.
    """
    embedding = model.model.embed_tokens.weight  # (V, W)
    torch.nn.init.normal_(embedding, std=0.1)
    embedding[:, 0] = 1.0
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            torch.nn.init.constant_(norm.weight, 1.5)
    first = model.model.layers[0].self_attn
    size, group = first.head_dim, first.num_key_value_groups
    planes = torch.arange(size // 2)
    share = (planes < 6) / 6**0.5  # fast planes tell neighbours apart
    angles = theta ** (-planes / (size / 2))
    query = 2 * torch.cat((share, torch.zeros(size // 2)))
    for head in range(min(3, max(2, model.config.num_key_value_heads - 1))):
        turn = (head + 1) * angles
        key = 2 * torch.cat((share * torch.cos(turn), share * torch.sin(turn)))
        first.k_proj.weight[head * size : (head + 1) * size, 0] = key
        for index in range(head * group, (head + 1) * group):
            first.q_proj.weight[index * size : (index + 1) * size, 0] = query


@dataclass(frozen=True)
class Batch:
    """Lessons of one length, ready to learn from.

    Attributes:
        ids: (B, T+1), padded at the end.
        answers: (B, T+1), where ids are answers.
        kinds: the kind of each answer, row by row.
        owners: (N, 3), of questions that need a thing's owner: row, position of the thing, owner.
    """

    ids: torch.Tensor
    answers: torch.Tensor
    kinds: list[str]
    owners: torch.Tensor


def draw(rng: Random, stage: Stage, tokens: int) -> Batch:
    """Draw a batch of about `tokens` words."""
    length = rng.choice(stage.lengths)
    count = max(tokens // length, 1)
    fits = [size for size in stage.sizes if ROOM[size] <= length]
    ids = torch.full((count, length + 1), PAD)
    answers = torch.zeros(count, length + 1, dtype=torch.bool)
    kinds: list[str] = []
    owners: list[tuple[int, int, int]] = []
    for row in range(count):
        asking = rng.uniform(*stage.asking)
        made = lesson(rng, SIZES[rng.choice(fits)], length - 8, stage.kinds, asking, stage.talk)
        kept = min(len(made.words), length + 1)
        ids[row, :kept] = torch.tensor([IDS[word] for word in made.words[:kept]])
        answers[row, :kept] = torch.tensor(made.answers[:kept])
        kinds += made.kinds[: int(answers[row].sum())]
        owners += [(row, index, owner) for index, owner in owners_asked(made.words[:kept])]
    return Batch(ids, answers, kinds, torch.tensor(owners, dtype=torch.long).view(-1, 3))


def owners_asked(said: list[str]) -> list[tuple[int, int]]:
    """Find the things whose owner a question needs: their position, and the owner's id."""
    given = {said[i]: said[i - 1] for i in range(2, len(said)) if said[i - 2] == "gave"}
    return [
        (i, IDS[given[said[i]]])
        for i in range(2, len(said) - 1)
        if said[i - 1] == "owns" or said[i - 2 : i] == ["owner", "of"]
    ]
