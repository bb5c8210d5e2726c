"""A KV cache as tensors and as a file."""

import dataclasses
import stat

import pytest
import torch
from test_geometry import GEOMETRY, signature

from kvmap import artifacts
from kvmap.cache import KVCache, concat, load_cache, save
from kvmap.errors import UsageError

SIGNATURE = signature(geometry=dataclasses.replace(GEOMETRY, layers=2, rope=(None, None)))


def cache(
    tokens: int, start: int = 0, batch: int = 2, seed: int = 0, masked: bool = False
) -> KVCache:
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, GEOMETRY.kv_heads, tokens, GEOMETRY.head_size)
    tensors = [torch.randn(shape, generator=generator) for _ in range(4)]
    positions = torch.arange(start, start + tokens).expand(batch, -1)
    mask = torch.arange(tokens).expand(batch, -1) >= 2 if masked else None
    return KVCache(tuple(tensors[:2]), tuple(tensors[2:]), positions, positions + 50, mask)


def assert_same(first: KVCache, second: KVCache) -> None:
    for one, other in zip(
        (*first.keys, *first.values), (*second.keys, *second.values), strict=True
    ):
        assert torch.equal(one, other)
    for field in ("positions", "token_ids", "mask"):
        one, other = getattr(first, field), getattr(second, field)
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_sizes():
    found = cache(7)
    assert (found.layers, found.tokens) == (2, 7)
    assert found.bytes == 4 * 2 * 2 * 7 * 6 * 4


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cut", [1, 4, 6])
def test_pieces_join_to_the_whole(cut, masked):
    whole = cache(7, masked=masked)
    assert_same(concat(whole.slice(0, cut), whole.slice(cut, 7)), whole)


def test_slice_is_a_view():
    whole = cache(7)
    part = whole.slice(2, 5)
    assert part.positions.tolist() == [[2, 3, 4]] * 2
    assert part.keys[0].data_ptr() == whole.keys[0][:, :, 2].data_ptr()


def test_joining_a_padded_cache_with_a_plain_one_masks_the_pads_only():
    joined = concat(cache(4, masked=True), cache(3, start=4))
    assert joined.mask.tolist() == [[False, False, True, True, True, True, True]] * 2


def test_joining_forgets_tokens_known_on_one_side_only():
    unknown = dataclasses.replace(cache(3, start=4), token_ids=None)
    assert concat(cache(4), unknown).token_ids is None


def test_expand_repeats_a_batch_of_one():
    one = cache(3, batch=1)
    many = one.expand(4)
    assert many.positions.shape == (4, 3)
    assert all(torch.equal(many.keys[0][row], one.keys[0][0]) for row in range(4))
    with pytest.raises(ValueError, match="expand needs a batch of 1, found 4"):
        many.expand(8)


def test_to_changes_keys_and_values_only():
    found = cache(3, masked=True).to(dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in (*found.keys, *found.values)} == {torch.bfloat16}
    assert (found.positions.dtype, found.mask.dtype) == (torch.int64, torch.bool)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_file_gives_back_the_cache_and_its_model(tmp_path, masked, dtype):
    kept = cache(5, start=11, masked=masked).to(dtype=dtype)
    save(kept, tmp_path / "one.cache", SIGNATURE)
    found, whose = load_cache(tmp_path / "one.cache")
    assert_same(found, kept)
    assert whose == SIGNATURE


def test_file_of_unknown_tokens_gives_none(tmp_path):
    save(dataclasses.replace(cache(5), token_ids=None), tmp_path / "c", SIGNATURE)
    assert load_cache(tmp_path / "c")[0].token_ids is None


def test_file_is_readable_by_its_owner_only(tmp_path):
    """A cache can be inverted to its text."""
    path = save(cache(5), tmp_path / "c", SIGNATURE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_equal_caches_give_equal_bytes(tmp_path):
    one, two = (save(cache(5), tmp_path / name, SIGNATURE) for name in "ab")
    assert one.read_bytes() == two.read_bytes()


def test_views_are_saved_as_what_they_show(tmp_path):
    save(cache(9).slice(2, 5), tmp_path / "c", SIGNATURE)
    assert_same(load_cache(tmp_path / "c")[0], cache(9).slice(2, 5))


def _tensors(kept: KVCache) -> dict[str, torch.Tensor]:
    tensors = {"positions": kept.positions}
    for layer in range(kept.layers):
        tensors |= {
            f"layers.{layer}.key": kept.keys[layer],
            f"layers.{layer}.value": kept.values[layer],
        }
    return tensors


def test_wrong_shape_is_refused_with_both_shapes(tmp_path):
    tensors = _tensors(cache(5)) | {"layers.1.value": torch.zeros(2, 2, 4, 6)}
    artifacts.write(tmp_path / "c", "cache", tensors, {"model": SIGNATURE.to_json()})
    message = r"layer 1's values have shape \(2, 2, 4, 6\) in .*, expected \(2, 2, 5, 6\).*a/model"
    with pytest.raises(UsageError, match=message):
        load_cache(tmp_path / "c")


def test_missing_layer_is_refused(tmp_path):
    tensors = _tensors(cache(5))
    del tensors["layers.1.key"]
    artifacts.write(tmp_path / "c", "cache", tensors, {"model": SIGNATURE.to_json()})
    with pytest.raises(UsageError, match=r"layers\.1\.key"):
        load_cache(tmp_path / "c")


def test_file_without_its_model_is_refused(tmp_path):
    artifacts.write(tmp_path / "c", "cache", _tensors(cache(5)), {})
    with pytest.raises(UsageError, match=r"header is not sound \(KeyError: 'model'\); run"):
        load_cache(tmp_path / "c")


@pytest.mark.parametrize(
    ("field", "found", "message"),
    [
        ("mask", torch.ones(2, 4, dtype=torch.bool), "mask"),
        ("token_ids", torch.zeros(1, 5, dtype=torch.int64), "token_ids"),
        ("token_ids", torch.zeros(2, 5), "token_ids is torch.float32, expected torch.int64"),
        ("positions", torch.arange(5), "positions"),
        ("positions", torch.zeros(2, 5), "positions"),
        (
            "positions",
            torch.zeros(0, 5).long(),
            r"positions are \(0, 5\) .* of one sequence at",
        ),
        (
            "layers.1.key",
            torch.ones(2, 2, 5, 6).int(),
            "1's keys .* in torch.int32, .* in float",
        ),
        ("layers.0.value", torch.ones(2, 2, 5, 6) > 0, "0's values .* in torch.bool, .* in float"),
    ],
)
def test_what_goes_with_the_keys_is_checked_too(tmp_path, field, found, message):
    tensors = _tensors(cache(5)) | {field: found}
    artifacts.write(tmp_path / "c", "cache", tensors, {"model": SIGNATURE.to_json()})
    with pytest.raises(UsageError, match=message):
        load_cache(tmp_path / "c")


def test_token_ids_of_int32_are_taken_as_models_take_them(tmp_path):
    kept = dataclasses.replace(cache(5), token_ids=cache(5).token_ids.int())
    assert_same(load_cache(save(kept, tmp_path / "c", SIGNATURE))[0], kept)


def test_keys_without_values_are_refused(tmp_path):
    kept = dataclasses.replace(cache(5), values=cache(5).values[:1])
    with pytest.raises(UsageError, match="found 1 layers of values, expected 2 of a/model"):
        save(kept, tmp_path / "c", SIGNATURE)
    with pytest.raises(ValueError, match="is shorter"):
        kept.placed([torch.device("cpu")])


def test_file_of_another_kind_is_refused(tmp_path):
    artifacts.write(tmp_path / "c", "map", {"x": torch.zeros(1)}, {})
    with pytest.raises(UsageError, match=r"(?s)c.*map.*cache"):
        load_cache(tmp_path / "c")
