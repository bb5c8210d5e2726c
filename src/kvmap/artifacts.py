"""One file format for everything kvmap keeps: safetensors with a header that says what it is.

The header lies under the single metadata key `kvmap`: one key, because the format fixes no
order among several, and equal input shall give equal bytes. Files are written whole or not at
all, and checked in full when opened. A JSON artifact (the index of a calibration folder, a
report) carries the same header fields beside its own.

This module knows no models and no maths; it is the only one that touches safetensors.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvmap import atomic, header
from kvmap.errors import KvmapError, UsageError
from kvmap.header import without_nan

__all__ = [
    "Artifact",
    "open_artifact",
    "read_json",
    "refuse_overwrite",
    "without_nan",
    "write",
    "write_json",
]

# Numbers looked at in one go for NaN and infinity.
CHECKED = 1 << 20

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Artifact:
    """An opened file: its header, and its tensors, each read when asked for."""

    path: Path
    kind: str
    metadata: dict[str, Any]  # what the writer added to the reserved fields
    sha256: str  # of the tensors
    shapes: dict[str, tuple[int, ...]]
    _file: Any = field(repr=False, compare=False)

    def names(self) -> list[str]:
        """List the tensors, in order of name."""
        return sorted(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        self._require(name)
        return self.shapes[name]

    def tensor(self, name: str) -> Tensor:
        """Read one tensor.

        Raises:
            UsageError: The file has no tensor of this name.
        """
        self._require(name)
        return self._file.get_tensor(name)

    def tensors(self) -> dict[str, Tensor]:
        """Read all tensors."""
        return {name: self.tensor(name) for name in self.names()}

    def _require(self, name: str) -> None:
        if name not in self.shapes:
            raise header.unusable(self.path, f"lacks the tensor {name!r}", self.kind)


def write(
    path: str | Path,
    kind: str,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
    private: bool = False,
) -> Path:
    """Write tensors and what they are as one file, whole or not at all.

    Args:
        metadata: JSON values without NaN; cannot replace the reserved fields.
        private: Give the file mode 0600.

    Raises:
        KvmapError: A tensor holds NaN or infinity, or the file cannot be written.
    """
    held = {name: tensors[name].detach().cpu().contiguous() for name in sorted(tensors)}
    for name, tensor in held.items():
        if not _finite(tensor):
            raise KvmapError(
                f"{path}: not written, since {name!r} would hold NaN or infinity; "
                "run the command again with --dtype float32"
            )
    sealed = header.sealed(kind, metadata, _digest(held))
    return atomic.write(path, _safetensors(held, header.dump(sealed)), private)


def open_artifact(path: str | Path, kind: str | None = None, verify: bool = True) -> Artifact:
    """Open a file and check it: format, kind, version, shapes, digest and finite numbers.

    Args:
        kind: The kind expected; None takes any.
        verify: Read all tensors once, to check their digest and that they are finite.

    Raises:
        UsageError: The file is not there, damaged, of another kind or of a newer version.
    """
    path = Path(path)
    fields = header.read_safetensors(path, kind)
    try:
        file = safe_open(str(path), framework="pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise header.unusable(path, "is cut short or damaged", fields["kind"]) from error
    provenance = {key: value for key, value in fields.items() if key not in header.RESERVED}
    digest = str(fields.get("sha256"))
    artifact = Artifact(path, fields["kind"], provenance, digest, shapes, file)
    if verify:
        _verify(artifact)
    return artifact


def write_json(path: str | Path, data: Mapping[str, Any], private: bool = False) -> Path:
    """Write a JSON artifact, whole or not at all; `data` says its `kind`. NaN becomes null."""
    sealed = header.sealed(data["kind"], without_nan(data), None)
    text = json.dumps(sealed, indent=2, allow_nan=False) + "\n"
    return atomic.write(path, [text.encode()], private)


def read_json(path: str | Path, kind: str | None = None) -> dict[str, Any]:
    """Read a JSON artifact, without its reserved fields but for `kind`.

    Raises:
        UsageError: The file is not there, damaged, of another kind or of a newer version.
    """
    fields = header.read_json(Path(path), kind)
    kept = {key: value for key, value in fields.items() if key not in header.RESERVED}
    return {"kind": fields["kind"], **kept}


def refuse_overwrite(path: str | Path, force: bool) -> None:
    """Stop before any work whose result would land on something, or nowhere.

    Raises:
        UsageError: The path exists and `force` is not set, is no ordinary file, or its folder
            does not exist.
    """
    atomic.check_replaceable(path)
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path}: exists already; pass --force to replace it")


def _safetensors(tensors: Mapping[str, Tensor], text: str) -> Iterator[atomic.Chunk]:
    """Lay out a safetensors file, tensor by tensor, so that no second copy is ever held."""
    # Widest elements first, as the format's own writer does: every tensor stays aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    table: dict[str, Any] = {"__metadata__": {"kvmap": text}}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        dtype, shape = _DTYPES[tensors[name].dtype], list(tensors[name].shape)
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    head = header.dump(table).encode()
    head += b" " * (-len(head) % 8)
    yield len(head).to_bytes(8, "little") + head
    for name in order:
        yield _bytes(tensors[name])


def _bytes(tensor: Tensor) -> memoryview:
    # A contiguous tensor of one element may have any stride, which no view of bytes takes.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return memoryview(flat.view(torch.uint8).numpy())


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Digest names, dtypes, shapes and bytes, in order of name."""
    digest = sha256()
    for name, tensor in tensors.items():
        digest.update(header.dump([name, _DTYPES[tensor.dtype], list(tensor.shape)]).encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    # In parts, since the check makes copies of what it looks at.
    return all(bool(torch.isfinite(part).all()) for part in tensor.flatten().split(CHECKED))


def _verify(artifact: Artifact) -> None:
    try:
        tensors = artifact.tensors()
        digest = _digest(tensors)
    except (SafetensorError, OSError, KeyError) as error:
        raise header.unusable(artifact.path, "holds unreadable tensors", artifact.kind) from error
    if digest != artifact.sha256:
        problem = "is damaged: its tensors do not match their digest"
        raise header.unusable(artifact.path, problem, artifact.kind)
    for name, tensor in tensors.items():
        if not _finite(tensor):
            problem = f"holds NaN or infinity in {name!r}"
            raise header.unusable(artifact.path, problem, artifact.kind)
