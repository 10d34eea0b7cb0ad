"""Which files an output has, which tensors are in each, and their headers.

Invariants: the same tensors and limit give the same files. A file's tensors are sorted by element
width (widest first, so that each is aligned), then by their place in the source, so that a copy
reads from front to back; computed tensors come first of their width, by name. Shards are filled in
the order of the sources; a tensor larger than the limit has a shard of its own.
*Source:* names and index of Hugging Face's sharded safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from specctl.checkpoint.tensor_entry import DTYPE_BITS
from specctl.contract.file_names import SINGLE
from specctl.formats.written import Copy, Joined, Rows, Span, TensorSource, num_bytes

DEFAULT_SHARD_BYTES = 5 * 10**9
METADATA: Mapping[str, str] = {"format": "pt"}


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputFile:
    """One weight file.

    Args:
        name: of the file.
        header: its first bytes, up to the data.
        tensors: key -> source, in the order of the data.
    """

    name: str
    header: bytes
    tensors: Mapping[str, TensorSource]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(num_bytes(source) for source in self.tensors.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All weight files of an output, and the index when there are several."""

    files: tuple[OutputFile, ...]
    index: bytes | None

    @property
    def size(self) -> int:
        """Bytes of all weight files."""
        return sum(file.size for file in self.files)


def plan_layout(
    tensors: Mapping[str, TensorSource], *, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> Layout:
    """Return the files for the tensors; several, with an index, when they exceed the limit."""
    groups = _groups(tensors, max_shard_bytes)
    if not groups[1:]:
        return Layout(files=(_file(SINGLE, groups[0] if groups else {}),), index=None)
    total = len(groups)
    files = tuple(
        _file(f"model-{number:05d}-of-{total:05d}.safetensors", group)
        for number, group in enumerate(groups, 1)
    )
    return Layout(files=files, index=index_bytes(files))


def index_bytes(files: tuple[OutputFile, ...]) -> bytes:
    """Return the text of the index of some files."""
    weight_map = {key: file.name for file in files for key in file.tensors}
    total = sum(num_bytes(source) for file in files for source in file.tensors.values())
    return json_bytes(
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )


def json_bytes(value: object) -> bytes:
    """Return a JSON file's bytes: two spaces, keys in their order, a final newline."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def header_bytes(tensors: Mapping[str, TensorSource]) -> bytes:
    """Return a safetensors header for tensors in the given order, padded to eight bytes."""
    header: dict[str, object] = {"__metadata__": dict(METADATA)}
    cursor = 0
    for key, source in tensors.items():
        end = cursor + num_bytes(source)
        header[key] = {
            "dtype": source.dtype,
            "shape": list(source.out_shape),
            "data_offsets": [cursor, end],
        }
        cursor = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _groups(tensors: Mapping[str, TensorSource], limit: int) -> list[dict[str, TensorSource]]:
    groups: list[dict[str, TensorSource]] = []
    filled = 0
    for key in sorted(tensors, key=lambda key: (_place(tensors[key]), key)):
        size = num_bytes(tensors[key])
        if not groups or filled + size > limit:
            groups.append({})
            filled = 0
        groups[-1][key] = tensors[key]
        filled += size
    return groups


def _file(name: str, tensors: Mapping[str, TensorSource]) -> OutputFile:
    order = sorted(
        tensors,
        key=lambda key: (-DTYPE_BITS[tensors[key].dtype], _place(tensors[key]), key),
    )
    ordered = {key: tensors[key] for key in order}
    return OutputFile(name=name, header=header_bytes(ordered), tensors=ordered)


def _place(source: TensorSource) -> tuple[str, str, int]:
    if isinstance(source, Copy | Rows):
        return source.origin, source.ref.file, source.ref.begin
    if isinstance(source, Span):
        return source.origin, source.ref.file, source.ref.begin + source.begin_bytes
    if isinstance(source, Joined):
        return source.origin, source.parts[0].file, source.parts[0].begin
    return "", "", 0
