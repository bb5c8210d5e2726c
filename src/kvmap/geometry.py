"""Shape of a model's KV cache, what identifies the model, and whether two can be paired.

Knows numbers and digests only: no tensors, no transformers.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import starmap, zip_longest
from typing import Any

from kvmap.errors import UsageError


@dataclass(frozen=True)
class RopeTable:
    """How one attention layer turns its keys: RoPE, Su et al., arXiv 2104.09864.

    Attributes:
        inverse_frequencies: Radians per position of each rotated plane; twice as
            many leading channels of a head are rotated, the rest pass through.
        scaling: Factor on cos and sin (YaRN's and longrope's attention factor).
        layout: Which channels form a plane: "half" (i, i + n/2) or "interleaved" (2i, 2i + 1).
    """

    inverse_frequencies: tuple[float, ...]
    scaling: float = 1.0
    layout: str = "half"


@dataclass(frozen=True)
class Geometry:
    """Shape of a model's cache.

    `rope` has one table per layer, None where keys carry no position.
    """

    layers: int
    kv_heads: int
    head_size: int
    query_heads: int
    hidden_size: int
    vocabulary: int
    max_positions: int
    model_type: str
    rope: tuple[RopeTable | None, ...]

    @property
    def width(self) -> int:
        """Channels of one layer's keys (or values) over all KV heads: H * D."""
        return self.kv_heads * self.head_size

    def kv_bytes_per_token(self, itemsize: int = 2) -> int:
        """Return the bytes one token's keys and values take over all layers."""
        return 2 * self.layers * self.width * itemsize

    def same_cache(self, other: Geometry) -> bool:
        """Say whether caches have one shape and are turned alike, to what a device rounds."""
        return (
            all(getattr(self, name) == getattr(other, name) for name in _SCALARS)
            and len(self.rope) == len(other.rope)
            and all(starmap(_turn_alike, zip(self.rope, other.rope, strict=True)))
        )

    def require_positions(self, name: str, count: int, what: str, remedy: str) -> None:
        """Check that a model of this name reads so many positions, where its end is known.

        Args:
            what: Needs them.
            remedy: What to do if there are fewer.

        Raises:
            UsageError: There are.
        """
        if 0 < self.max_positions < count:
            raise UsageError(
                f"{what} needs {count} positions, but {name} reads at most {self.max_positions}; "
                f"{remedy}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data; layers that share a rotation share its table."""
        tables = list(dict.fromkeys(self.rope))
        data = {name: getattr(self, name) for name in _SCALARS}
        data["rope_tables"] = [asdict(table) if table else None for table in tables]
        data["rope"] = [tables.index(table) for table in self.rope]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Geometry:
        """Rebuild a geometry from `to_json`'s data.

        Raises:
            ValueError: A number is none, or beyond what any model has.
        """
        tables = [_table_from_json(table) for table in data["rope_tables"]]
        rope = tuple(tables[index] for index in data["rope"])
        for name, most in _MOST.items():
            if type(data[name]) is not int or not 0 <= data[name] <= most:
                raise ValueError(f"{name} is no number from 0 to {most}")
        if data["layers"] != len(rope) or 0 in (data["kv_heads"], data["head_size"]):
            raise ValueError(f"no cache has this shape, with RoPE tables of {len(rope)} layers")
        if not all(_turns(table, data["head_size"]) for table in tables if table):
            raise ValueError("a RoPE table turns no such heads")
        return cls(**{name: data[name] for name in _SCALARS}, rope=rope)


_SCALARS = (
    "layers",
    "kv_heads",
    "head_size",
    "query_heads",
    "hidden_size",
    "vocabulary",
    "max_positions",
    "model_type",
)
# Headers come from files: what is larger is damage, not a model.
_MOST = {"layers": 4096, "kv_heads": 4096, "head_size": 65536} | dict.fromkeys(
    ("query_heads", "hidden_size", "vocabulary", "max_positions"), 2**31
)
_LARGE = 1000.0  # radians per position, or factor: both are about 1


def _table_from_json(data: dict[str, Any] | None) -> RopeTable | None:
    if data is None:
        return None
    frequencies = tuple(float(value) for value in data["inverse_frequencies"])
    return RopeTable(frequencies, float(data["scaling"]), data["layout"])


def _turn_alike(one: RopeTable | None, other: RopeTable | None) -> bool:
    if one is None or other is None:
        return one is other
    pairs = zip_longest(
        (one.scaling, *one.inverse_frequencies), (other.scaling, *other.inverse_frequencies)
    )
    close = all(None not in pair and math.isclose(*pair, rel_tol=1e-5) for pair in pairs)
    return close and one.layout == other.layout


def _turns(table: RopeTable, head_size: int) -> bool:
    """Say whether a table is one of heads of a size, in numbers that fp32 can turn by."""
    planes = len(table.inverse_frequencies)
    return (
        table.layout in ("half", "interleaved")
        and 2 <= 2 * planes <= head_size
        and all(abs(frequency) <= _LARGE for frequency in table.inverse_frequencies)
        and 1 / _LARGE <= table.scaling <= _LARGE
    )


@dataclass(frozen=True)
class Signature:
    """What identifies a model to a map: a map refuses any other.

    `revision` is None for local folders; digests are sha256 in hex.
    """

    name: str
    revision: str | None
    config_digest: str
    weights_digest: str
    tokenizer_digest: str
    template_digest: str
    dtype: str
    geometry: Geometry

    @cached_property
    def digest(self) -> str:
        """Digest weights, config, tokenizer and template; name, dtype and revision do not count."""
        return signature_digest(
            self.config_digest, self.weights_digest, self.tokenizer_digest, self.template_digest
        )

    def require_same(self, found: Signature, said: str, remedy: str) -> None:
        """Check that a model is this one, by digest and by its cache's shape and RoPE.

        Args:
            said: Where this one stands, as in "the map's target".
            remedy: What to do if it is another.

        Raises:
            UsageError: It is.
        """
        other = f"{found.name} (digest {found.digest[:12]})"
        if found.digest == self.digest:
            if self.geometry.same_cache(found.geometry):
                return
            other = "it with another cache shape or RoPE, by damage or another transformers"
        raise UsageError(
            f"{said} is {self.name} (digest {self.digest[:12]}), found {other}; {remedy}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return data | {"geometry": self.geometry.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Signature:
        """Rebuild a signature from `to_json`'s data.

        Raises:
            ValueError: A name or a digest is no text, or the geometry is none.
        """
        texts = set(cls.__dataclass_fields__) - {"geometry", "revision"}
        if not all(isinstance(data[name], str) for name in texts):
            raise ValueError(f"{', '.join(sorted(texts))} must be text")
        return cls(**{**data, "geometry": Geometry.from_json(data["geometry"])})


def signature_digest(config: str, weights: str, tokenizer: str, template: str) -> str:
    """Return the one digest of a model's four."""
    return hashlib.sha256("\n".join((config, weights, tokenizer, template)).encode()).hexdigest()


def pairing_problems(source: Signature, target: Signature) -> list[str]:
    """Say why the source's cache cannot be mapped to the target's; empty where it can."""
    problems = []
    if source.tokenizer_digest != target.tokenizer_digest:
        problems.append(
            f"the tokenizers differ ({source.name}: {source.tokenizer_digest[:12]}, "
            f"{target.name}: {target.tokenizer_digest[:12]}), so their positions do not correspond"
        )
    elif source.template_digest != target.template_digest:
        problems.append(
            f"the chat templates of {source.name} and {target.name} differ, "
            "so the same conversation becomes different tokens"
        )
    return problems


def json_digest(data: Any) -> str:
    """Return the sha256 of data as canonical JSON."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
