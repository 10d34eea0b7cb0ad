"""Read one tensor's bytes once and count what no healthy weight holds, in bounded memory.

Everything runs over slices, counts and comparisons of `bytes`, which are loops in C: a bf16 weight
passes at more than a gigabyte a second without any array library.

Invariants: at most `PIECE_BYTES` of a tensor are held, whatever its size; a piece is a whole number
of rows when a row fits. Elements are little-endian, as both containers store them.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specctl.checkpoint import Checkpoint, TensorEntry

PIECE_BYTES = 4 << 20
SAMPLE_ROWS = 64
SAMPLE_COLUMNS = 512
MAX_FINGERPRINTS = 16384

ELEMENT_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "BF16": 2,
        "F16": 2,
        "F32": 4,
        "F64": 8,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "F8_E8M0": 1,
        "F8_E4M3FNUZ": 1,
        "F8_E5M2FNUZ": 1,
    }
)
"""Dtypes that are scanned -> bytes of an element; integers and packed weights are not."""

_TOP_BYTES: Mapping[str, bytes] = MappingProxyType(
    {
        "BF16": b"\x7f\xff",
        "F32": b"\x7f\xff",
        "F64": b"\x7f\xff",
        "F16": b"\x7c\x7d\x7e\x7f\xfc\xfd\xfe\xff",
        "F8_E4M3": b"\x7f\xff",
        "F8_E5M2": b"\x7c\x7d\x7e\x7f\xfc\xfd\xfe\xff",
        "F8_E8M0": b"\xff",
        "F8_E4M3FNUZ": b"\x80",
        "F8_E5M2FNUZ": b"\x80",
    }
)
# Where the exponent reaches into the second byte, the bits that must be set there as well.
_SECOND_MASK: Mapping[str, int] = MappingProxyType({"BF16": 0x80, "F32": 0x80, "F64": 0xF0})


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """What one pass over a tensor saw.

    Args:
        num_elements: of the tensor.
        num_nonfinite: NaN and infinite elements.
        first_nonfinite: flat index of the first of them, None without any.
        is_zero: every byte is zero.
        is_constant: every element has the same bytes; true of a zero tensor too.
        zero_rows: ascending indexes of rows of zeros, the first `MAX_FINGERPRINTS` of them.
        num_zero_rows: how many there are.
        num_sampled_rows: rows whose fingerprints were compared, zero rows left out.
        num_distinct_rows: different ones among them.
        sample: some rows, evenly spread, the first `SAMPLE_COLUMNS` elements of each, as stored.
    """

    num_elements: int
    num_nonfinite: int
    first_nonfinite: int | None
    is_zero: bool
    is_constant: bool
    zero_rows: tuple[int, ...]
    num_zero_rows: int
    num_sampled_rows: int
    num_distinct_rows: int
    sample: tuple[bytes, ...]


def is_scannable(entry: TensorEntry) -> bool:
    """Tell whether a tensor's dtype is one that `scan` reads, and it has the bytes it says."""
    size = ELEMENT_BYTES.get(entry.dtype, 0)
    return 0 < entry.nbytes == math.prod(entry.shape) * size


def scan(checkpoint: Checkpoint, entry: TensorEntry) -> Scan:
    """Read the tensor once; its dtype must be a key of `ELEMENT_BYTES`.

    Raises:
        DiagnosticError: SD108, SD135, as `Checkpoint.iter_range`.
    """
    size = ELEMENT_BYTES[entry.dtype]
    count = entry.nbytes // size
    columns = entry.shape[-1] if len(entry.shape) > 1 else count
    row_bytes = max(columns, 1) * size
    rows = _Rows(num_rows=entry.nbytes // row_bytes, row_bytes=row_bytes, element_bytes=size)
    state = _State(dtype=entry.dtype, element_bytes=size)
    for piece in pieces(checkpoint, entry, row_bytes):
        state.add(piece)
        if row_bytes <= PIECE_BYTES and len(entry.shape) > 1:
            rows.add(piece)
    return Scan(
        num_elements=count,
        num_nonfinite=state.num_nonfinite,
        first_nonfinite=state.first_nonfinite,
        is_zero=state.is_constant and not any(state.element),
        is_constant=state.is_constant,
        zero_rows=tuple(rows.zero_rows),
        num_zero_rows=rows.num_zero_rows,
        num_sampled_rows=rows.num_sampled,
        num_distinct_rows=len(rows.fingerprints),
        sample=tuple(rows.sample),
    )


def pieces(checkpoint: Checkpoint, entry: TensorEntry, row_bytes: int) -> Iterator[bytes]:
    """Yield the bytes in pieces of whole rows, or of `PIECE_BYTES` when a row is larger."""
    step = PIECE_BYTES // row_bytes * row_bytes or PIECE_BYTES
    return checkpoint.iter_range(entry.file, entry.begin, entry.end, step)


class _State:
    """Counts over all elements."""

    def __init__(self, *, dtype: str, element_bytes: int) -> None:
        self.num_nonfinite = 0
        self.first_nonfinite: int | None = None
        self.is_constant = True
        self.element = b""
        self._dtype = dtype
        self._size = element_bytes
        self._seen = 0

    def add(self, piece: bytes) -> None:
        size = self._size
        if not self.element:
            self.element = piece[:size]
        if self.is_constant:
            head = self.element * (min(len(piece), 64) // size)
            self.is_constant = piece.startswith(head) and piece == self.element * (
                len(piece) // size
            )
        top = piece if size == 1 else piece[size - 1 :: size]
        marks = _TOP_BYTES[self._dtype]
        if any(mark in top for mark in marks):  # a search, which is faster than a count
            self._count(piece, top, marks)
        self._seen += len(piece) // size

    def _count(self, piece: bytes, top: bytes, marks: bytes) -> None:
        mask = _SECOND_MASK.get(self._dtype)
        if mask is None:
            hits = [place for place in map(top.find, _singles(marks)) if place >= 0]
            found, first = sum(top.count(mark) for mark in marks), min(hits)
        else:
            second = piece[self._size - 2 :: self._size]
            found, first = _both(top, second, marks, mask)
        if found and self.first_nonfinite is None:
            self.first_nonfinite = self._seen + first
        self.num_nonfinite += found


def _singles(marks: bytes) -> list[bytes]:
    return [bytes([mark]) for mark in marks]


def _both(top: bytes, second: bytes, marks: bytes, mask: int) -> tuple[int, int]:
    """Return how many elements have a marked top byte and all mask bits, and the first of them."""
    # 1 where the byte is marked; the two tables are joined as integers, a bit for each element.
    is_top = top.translate(bytes(value in marks for value in range(256)))
    is_full = second.translate(bytes(value & mask == mask for value in range(256)))
    joined = int.from_bytes(is_top, "little") & int.from_bytes(is_full, "little")
    if not joined:
        return 0, 0
    return joined.bit_count(), ((joined & -joined).bit_length() - 1) // 8


class _Rows:
    """What is collected row by row."""

    def __init__(self, *, num_rows: int, row_bytes: int, element_bytes: int) -> None:
        self.zero_rows: list[int] = []
        self.num_zero_rows = 0
        self.num_sampled = 0
        self.fingerprints: set[int] = set()
        self.sample: list[bytes] = []
        self._row_bytes = row_bytes
        self._zero = bytes(row_bytes)
        self._print_step = max(1, -(-num_rows // MAX_FINGERPRINTS))
        self._sample_step = max(1, num_rows // SAMPLE_ROWS)
        self._sample_bytes = min(SAMPLE_COLUMNS * element_bytes, row_bytes)
        self._index = 0

    def add(self, piece: bytes) -> None:
        width, zero, first = self._row_bytes, self._zero, self._index
        for place in range(0, len(piece) - width + 1, width):
            if not piece[place] and piece.startswith(zero, place):
                self._add_zero(first + place // width)
        step = self._print_step
        for index in range(-(-first // step) * step, first + len(piece) // width, step):
            row = piece[(index - first) * width : (index - first + 1) * width]
            if row != zero:
                self.num_sampled += 1
                self.fingerprints.add(hash(row))
        step = self._sample_step
        for index in range(-(-first // step) * step, first + len(piece) // width, step):
            if len(self.sample) < SAMPLE_ROWS:
                place = (index - first) * width
                self.sample.append(piece[place : place + self._sample_bytes])
        self._index += len(piece) // width

    def _add_zero(self, index: int) -> None:
        self.num_zero_rows += 1
        if len(self.zero_rows) < MAX_FINGERPRINTS:
            self.zero_rows.append(index)


def floats(dtype: str, data: bytes) -> array[float] | None:
    """Return stored elements as single or double precision numbers; None for eight-bit dtypes."""
    if dtype == "F16":
        return array("f", struct.unpack(f"<{len(data) // 2}e", data))
    if dtype == "BF16":
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        data = bytes(wide)
    elif dtype not in ("F32", "F64"):
        return None
    values = array("d" if dtype == "F64" else "f")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def cosine(first: array[float], second: array[float]) -> float:
    """Return the cosine of two vectors, 0 when one of them is zero."""
    product = math.fsum(map(_times, first, second))
    scale = math.sqrt(math.fsum(map(_times, first, first)) * math.fsum(map(_times, second, second)))
    return product / scale if scale > 0.0 else 0.0


def _times(first: float, second: float) -> float:
    return first * second
