"""Shape and identity of a model, and which two can be paired."""

import dataclasses
import json

import pytest

from kvmap.errors import UsageError
from kvmap.geometry import Geometry, RopeTable, Signature, pairing_problems

TABLE = RopeTable((1.0, 0.1, 0.01), 1.2, "interleaved")
GEOMETRY = Geometry(
    layers=4,
    kv_heads=2,
    head_size=6,
    query_heads=8,
    hidden_size=48,
    vocabulary=100,
    max_positions=512,
    model_type="llama",
    rope=(TABLE, None, RopeTable((1.0, 0.1, 0.01), 1.2, "interleaved"), RopeTable((1.0, 0.2))),
)


def signature(**changes) -> Signature:
    fields = {
        "name": "a/model",
        "revision": "main",
        "config_digest": "c" * 64,
        "weights_digest": "w" * 64,
        "tokenizer_digest": "t" * 64,
        "template_digest": "p" * 64,
        "dtype": "float32",
        "geometry": GEOMETRY,
    }
    return Signature(**(fields | changes))


def test_geometry_survives_json():
    assert Geometry.from_json(json.loads(json.dumps(GEOMETRY.to_json()))) == GEOMETRY


def test_rope_frequencies_survive_json_bit_by_bit():
    odd = RopeTable((0.1 + 0.2, 1 / 3, 1e-17), 1.1386294361119891)
    again = Geometry.from_json(
        json.loads(json.dumps(dataclasses.replace(GEOMETRY, rope=(odd,) * 4).to_json()))
    )
    assert again.rope == (odd,) * 4


def turned(**changes) -> Geometry:
    """Return GEOMETRY with its first table changed."""
    table = dataclasses.replace(TABLE, **changes)
    return dataclasses.replace(GEOMETRY, rope=(table, *GEOMETRY.rope[1:]))


def test_caches_are_the_same_up_to_what_a_device_rounds():
    rounded = tuple(frequency * (1 + 1e-7) for frequency in TABLE.inverse_frequencies)
    assert GEOMETRY.same_cache(turned(inverse_frequencies=rounded))
    other = tuple(frequency * 1.01 for frequency in TABLE.inverse_frequencies)
    for changed in (
        turned(inverse_frequencies=other),
        turned(inverse_frequencies=(*TABLE.inverse_frequencies, 0.5)),
        turned(scaling=1.3),
        turned(layout="half"),
        dataclasses.replace(GEOMETRY, rope=(None, *GEOMETRY.rope[1:])),
        dataclasses.replace(GEOMETRY, rope=GEOMETRY.rope[:3]),
        dataclasses.replace(GEOMETRY, vocabulary=101),
    ):
        assert not GEOMETRY.same_cache(changed)


def test_a_model_reads_no_further_than_its_positions():
    said = "^--length needs 513 positions, but a reads at most 512; give less$"
    with pytest.raises(UsageError, match=said):
        GEOMETRY.require_positions("a", 513, "--length", "give less")
    GEOMETRY.require_positions("a", 512, "--length", "give less")
    endless = dataclasses.replace(GEOMETRY, max_positions=0)
    endless.require_positions("a", 2**40, "--length", "give less")


def test_another_model_and_the_same_with_another_cache_are_told_apart():
    mine, other = signature(), signature(weights_digest="x" * 64)
    begin = rf"^x\.map: its target is a/model \(digest {mine.digest[:12]}\), found"
    wrong = dataclasses.replace(mine, geometry=turned(scaling=1.3))
    for found, said in (
        (other, rf"a/model \(digest {other.digest[:12]}\)"),
        (wrong, "it with another cache shape or RoPE, by damage or another transformers"),
    ):
        with pytest.raises(UsageError, match=f"{begin} {said}; fit again$"):
            mine.require_same(found, "x.map: its target", "fit again")
    rounded = tuple(frequency * (1 + 1e-7) for frequency in TABLE.inverse_frequencies)
    same = dataclasses.replace(mine, geometry=turned(inverse_frequencies=rounded), dtype="bfloat16")
    mine.require_same(same, "x.map: its target", "fit again")


@pytest.mark.parametrize("revision", ["main", None])
def test_signature_survives_json(revision):
    one = signature(revision=revision)
    again = Signature.from_json(json.loads(json.dumps(one.to_json())))
    assert again == one
    assert again.digest == one.digest


@pytest.mark.parametrize(
    ("layers", "heads", "size", "itemsize", "expected"),
    [(4, 2, 6, 2, 192), (4, 2, 6, 4, 384), (64, 8, 128, 2, 262_144)],
)
def test_cache_bytes_per_token_count_keys_and_values(layers, heads, size, itemsize, expected):
    """The last row is Qwen3-32B: 256 KiB a token in bf16."""
    geometry = dataclasses.replace(GEOMETRY, layers=layers, kv_heads=heads, head_size=size)
    assert geometry.kv_bytes_per_token(itemsize) == expected


def test_models_of_any_two_geometries_can_be_paired():
    other = dataclasses.replace(GEOMETRY, layers=9, kv_heads=3, head_size=10, rope=(None,) * 9)
    assert pairing_problems(signature(), signature(name="b", geometry=other)) == []


def test_other_tokenizer_is_a_problem_said_with_both_names():
    problems = pairing_problems(signature(), signature(name="b", tokenizer_digest="u" * 64))
    assert len(problems) == 1
    assert "tokenizers differ (a/model: tttttttttttt, b: uuuuuuuuuuuu)" in problems[0]


def test_other_chat_template_is_a_problem():
    problems = pairing_problems(signature(), signature(name="b", template_digest="q" * 64))
    assert len(problems) == 1
    assert "chat templates of a/model and b differ" in problems[0]


@pytest.mark.parametrize(
    "field", ["config_digest", "weights_digest", "tokenizer_digest", "template_digest"]
)
def test_digest_depends_on_what_is_computed(field):
    assert signature(**{field: "x" * 64}).digest != signature().digest


@pytest.mark.parametrize(
    ("field", "value"), [("name", "b"), ("revision", "v2"), ("dtype", "float16")]
)
def test_digest_does_not_depend_on_what_it_is_called(field, value):
    assert signature(**{field: value}).digest == signature().digest
