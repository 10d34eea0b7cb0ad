"""Write files so that a reader sees the old content or the whole new one, never a part.

Invariants: a temporary file in the same directory is flushed to disk and renamed over the target;
on any exception, a KeyboardInterrupt included, the temporary file is removed and the target is as
before. The bytes depend on the arguments only.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from specctl.checkpoint.tensor_entry import DTYPE_BITS

TensorData = tuple[str, tuple[int, ...], "bytes | bytearray | memoryview"]


@contextmanager
def atomic_write(path: Path | str) -> Iterator[BinaryIO]:
    """Yield a binary stream whose content becomes `path` when the block ends without exception.

    Raises:
        OSError: the directory is missing or not writable, or the disk is full.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name[:150]}.{os.urandom(6).hex()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "w+b") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        with suppress(FileNotFoundError):
            temporary.chmod(target.stat().st_mode & 0o7777)
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_directory(target.parent)


def sync_directory(directory: Path) -> None:
    """Flush a directory's entries to disk, where the file system can."""
    with suppress(OSError):  # some file systems refuse to sync a directory
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text_atomic(path: Path | str, text: str) -> None:
    """Write `text` as UTF-8 through `atomic_write`."""
    with atomic_write(path) as stream:
        stream.write(text.encode("utf-8"))


def write_safetensors(
    path: Path | str,
    tensors: Mapping[str, TensorData],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file atomically; the same arguments give the same bytes.

    Args:
        path: the file.
        tensors: name -> (dtype, shape, little-endian data).
        metadata: text pairs for `__metadata__`.

    Raises:
        ValueError: a dtype is unknown or the data's length is not shape x dtype.
    """
    with atomic_write(path) as stream:
        stream_safetensors(stream, tensors, metadata)


def stream_safetensors(
    stream: BinaryIO,
    tensors: Mapping[str, TensorData],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the bytes of `write_safetensors` to an open stream."""
    # Wide elements first, then by name: every tensor is aligned to its element size.
    order = sorted(tensors, key=lambda key: (-_bits(key, tensors[key][0]), key))
    header: dict[str, object] = {}
    if metadata:
        header["__metadata__"] = dict(sorted(metadata.items()))
    cursor = 0
    for key in order:
        dtype, shape, data = tensors[key]
        num_bits = math.prod(shape) * _bits(key, dtype)
        if num_bits != len(memoryview(data).cast("B")) * 8:
            raise ValueError(f"`{key}`: {len(data)} bytes for shape {shape} of {dtype}")
        end = cursor + num_bits // 8
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [cursor, end]}
        cursor = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little"))
    stream.write(text)
    for key in order:
        stream.write(tensors[key][2])


def _bits(key: str, dtype: str) -> int:
    if dtype not in DTYPE_BITS:
        raise ValueError(f"`{key}`: unknown dtype {dtype!r}")
    return DTYPE_BITS[dtype]
