"""Pairs of models whose caches are known linear images of each other: the map is the right answer.

*Matched* (`twin`): B is A with every KV head's keys and queries turned by one angle per rotary
plane, which commutes with the rotation by position, and its values by an orthogonal matrix that
o_proj takes back. B computes A's function.

*Unmatched* (`image`): B has other KV heads, head size, rotary type and one layer more. Queries are
zero in all layers but the last, so attention is uniform there and the hidden states do not depend
on the keys; B's keys and values are any linear image of A's, and o_proj undoes the values' image.
The extra layer adds nothing to the hidden state, so what it caches is an image of the same layer.
"""

from dataclasses import dataclass

import torch
from checkpoints import LLAMA3, VOCABULARY, random_model
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Planted:
    """A pair and its map: content keys_t = keys_s @ key.T, values alike; rows are [T, H * D]."""

    source: PreTrainedModel
    target: PreTrainedModel
    source_layers: tuple[int, ...]  # per target layer, the source layer it is an image of
    keys: tuple[torch.Tensor, ...]  # per target layer [Ht * Dt, Hs * Ds]
    values: tuple[torch.Tensor, ...]


def _orthogonal(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, generator=generator)).Q


def _plane_rotation(size: int, generator: torch.Generator) -> torch.Tensor:
    """Turn each plane (i, i + size / 2) by its own angle: [size, size]."""
    angles = 6.2831853 * torch.rand(size // 2, generator=generator)
    cosine, sine = angles.cos().diag(), angles.sin().diag()
    return torch.cat((torch.cat((cosine, -sine), 1), torch.cat((sine, cosine), 1)))


@torch.no_grad()
def twin(model_type: str, seed: int, layers: int = 3) -> Planted:
    """Build a matched pair.

    Where keys are normalised, the norm weights are equal within each rotary plane: only then does
    a turn of the projection remain a turn after the norm.
    """
    heads, size, group = 2, 16, 2
    options = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads * group,
        "num_key_value_heads": heads,
        "head_dim": size,
    }
    source = random_model(
        model_type, seed, **options, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    for layer in source.model.layers:
        for norm in (
            getattr(layer.self_attn, "k_norm", None),
            getattr(layer.self_attn, "q_norm", None),
        ):
            if norm is not None:
                norm.weight[size // 2 :] = norm.weight[: size // 2]
    target = type(source)(source.config).eval()
    target.load_state_dict(source.state_dict())

    generator = torch.Generator().manual_seed(seed + 1)
    keys, values = [], []
    for layer in target.model.layers:
        attention = layer.self_attn
        turns = [_plane_rotation(size, generator) for _ in range(heads)]
        mixes = [_orthogonal(size, generator) for _ in range(heads)]
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            attention.k_proj.weight[own] = turns[head] @ attention.k_proj.weight[own]
            attention.v_proj.weight[own] = mixes[head] @ attention.v_proj.weight[own]
            for query in range(head * group, (head + 1) * group):
                reads = slice(query * size, (query + 1) * size)
                attention.q_proj.weight[reads] = turns[head] @ attention.q_proj.weight[reads]
                attention.o_proj.weight[:, reads] = (
                    attention.o_proj.weight[:, reads] @ mixes[head].T
                )
        keys.append(torch.block_diag(*turns))
        values.append(torch.block_diag(*mixes))
    return Planted(source, target, tuple(range(layers)), tuple(keys), tuple(values))


@torch.no_grad()
def image(seed: int, key_noise: float = 0.0) -> Planted:
    """Build an unmatched pair: 3 layers, 2 KV heads of 16, theta 1e4 -> 4, 4 of 24, llama3 at 5e5.

    `key_noise` > 0 adds a part to the target's keys that no map of the source's keys can reach.
    """
    source_heads, source_size, target_heads, target_size, queries, twice = 2, 16, 4, 24, 4, 1
    shared = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_attention_heads": queries}
    source = random_model(
        "llama",
        seed,
        **shared,
        num_hidden_layers=3,
        num_key_value_heads=source_heads,
        head_dim=source_size,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    target = random_model(
        "llama",
        seed,
        **shared,
        num_hidden_layers=4,
        num_key_value_heads=target_heads,
        head_dim=target_size,
        rope_parameters=LLAMA3,
    )
    origin = [0, 1, 1, 2]  # target layer `twice` is the copy that adds nothing
    target.model.embed_tokens.load_state_dict(source.model.embed_tokens.state_dict())
    target.model.norm.load_state_dict(source.model.norm.state_dict())
    target.lm_head.load_state_dict(source.lm_head.state_dict())

    generator = torch.Generator().manual_seed(seed + 1)
    keys, values = [], []
    for index, (layer, of) in enumerate(zip(target.model.layers, origin, strict=True)):
        theirs = source.model.layers[of]
        layer.mlp.load_state_dict(theirs.mlp.state_dict())
        layer.input_layernorm.load_state_dict(theirs.input_layernorm.state_dict())
        layer.post_attention_layernorm.load_state_dict(theirs.post_attention_layernorm.state_dict())
        own, other = layer.self_attn, theirs.self_attn

        key = (
            torch.randn(target_heads * target_size, source_heads * source_size, generator=generator)
            / 6
        )
        own.k_proj.weight.copy_(key @ other.k_proj.weight)
        own.k_proj.weight.add_(
            key_noise * torch.randn(own.k_proj.weight.shape, generator=generator) / 8
        )

        mixes = torch.randn(target_heads, target_size, source_size, generator=generator) / 4
        reads = [head * source_heads // target_heads for head in range(target_heads)]
        value = torch.zeros(target_heads, target_size, source_heads, source_size)
        for head, read in enumerate(reads):
            value[head, :, read] = mixes[head]
        value = value.view(target_heads * target_size, source_heads * source_size)
        own.v_proj.weight.copy_(value @ other.v_proj.weight)
        out = other.o_proj.weight.view(-1, queries, source_size)
        undone = [out[:, head] @ torch.linalg.pinv(mixes[head]) for head in range(queries)]
        own.o_proj.weight.copy_(torch.stack(undone, 1).flatten(1))

        if of < 2:
            other.q_proj.weight.zero_()
            own.q_proj.weight.zero_()
        if index == twice:
            own.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        keys.append(key)
        values.append(value)
    return Planted(source, target, tuple(origin), tuple(keys), tuple(values))
