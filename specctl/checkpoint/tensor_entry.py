"""One tensor on disk and the element types a safetensors file can hold.

*Source:* safetensors `Dtype` enumeration (bit widths; F4 and F6 are packed).
"""

from __future__ import annotations

import sys
from array import array
from types import MappingProxyType

import msgspec

from specctl.contract.manifest import TensorRef
from specctl.contract.text import printable

WEIGHT_DTYPES = ("BF16", "F16", "F32")
"""Dtypes of weights that need no scale."""
DTYPE_BITS: MappingProxyType[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "C64": 64,
        "F64": 64,
        "I64": 64,
        "U64": 64,
    }
)
INT_TYPECODES: MappingProxyType[str, str] = MappingProxyType(
    {
        "BOOL": "B",
        "U8": "B",
        "I8": "b",
        "U16": "H",
        "I16": "h",
        "U32": "I",
        "I32": "i",
        "U64": "Q",
        "I64": "q",
    }
)


def unpack_ints(dtype: str, data: bytes) -> array[int]:
    """Return the integers of little-endian `data`; `dtype` is a key of `INT_TYPECODES`."""
    values = array(INT_TYPECODES[dtype])
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One tensor on disk; a checkpoint has up to a hundred thousand, so it is built in C.

    Args:
        key: name in the file.
        file: weight file, relative to the checkpoint's root.
        dtype: safetensors spelling, a key of `DTYPE_BITS`.
        shape: as stored.
        begin: absolute byte offset of the first byte in the file.
        end: absolute byte offset after the last byte.
    """

    key: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Length of the byte range."""
        return self.end - self.begin

    def describe(self) -> str:
        """Return `file::key[shape dtype]`, the place form of diagnostics."""
        return place(self.file, self.key, self.shape, self.dtype)


def tensor_place(ref: TensorRef) -> str:
    """Return `file::key[shape dtype]` of a manifest's tensor."""
    return place(ref.file, ref.key, ref.shape, ref.dtype)


def shown(name: str) -> str:
    """Return a name from a file for a message: at most 120 characters, all of them printable."""
    return printable(name if len(name) <= 120 else name[:117] + "...")


def place(file: str, key: str, shape: object = None, dtype: object = None) -> str:
    """Return `file::key[shape dtype]`, leaving out what is unknown; names through `shown`."""
    dims = None
    if isinstance(shape, (tuple, list)):
        dims = shown(",".join(str(dim) for dim in shape[:16]))
    inner = " ".join(p for p in (dims, dtype) if isinstance(p, str) and p)
    tensor = f"{shown(file)}::{shown(key)}"
    return f"{tensor}[{inner}]" if inner else tensor
