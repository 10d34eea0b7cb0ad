"""Where the bytes of an output tensor lie: ranges of source files, in output order.

Invariants: the pieces of a tensor, one after another, are its bytes; neighbours in a file are one
piece. Nothing is read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from specctl.contract.manifest import TensorRef
from specctl.formats.written import (
    Copy,
    Joined,
    Origin,
    Rows,
    Span,
    TensorSource,
    Values,
    num_bytes,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRange:
    """Bytes [begin, end) of a weight file of one source."""

    origin: Origin
    file: str
    begin: int
    end: int


Piece = FileRange | bytes


def pieces_of(source: TensorSource) -> Iterator[Piece]:
    """Yield the pieces of one tensor in output order; rows in the order of the map."""
    if isinstance(source, Values):
        yield source.data
    elif isinstance(source, Copy):
        yield _range(source.ref, source.origin)
    elif isinstance(source, Joined):
        yield from merged(_range(part, source.origin) for part in source.parts)
    elif isinstance(source, Span):
        yield _span(source)
    else:
        yield from merged(row_ranges(source))


def _range(ref: TensorRef, origin: Origin) -> FileRange:
    return FileRange(origin=origin, file=ref.file, begin=ref.begin, end=ref.end)


def _span(source: Span) -> FileRange:
    begin = source.ref.begin + source.begin_bytes
    end = begin + num_bytes(source)
    if end > source.ref.end:
        raise ValueError(f"a span of `{source.ref.key}` ends behind the tensor")
    return FileRange(origin=source.origin, file=source.ref.file, begin=begin, end=end)


def row_bytes(source: Rows) -> int:
    """Return the bytes of one row of the stored matrix."""
    ref = source.ref
    return (ref.end - ref.begin) // ref.shape[0]


def row_ranges(source: Rows) -> Iterator[FileRange]:
    """Yield the range of each row, in the order given."""
    ref, size = source.ref, row_bytes(source)
    for row in source.rows:
        if not 0 <= row < ref.shape[0]:
            raise ValueError(f"row {row} of `{ref.key}`, which has {ref.shape[0]}")
        begin = ref.begin + row * size
        yield FileRange(origin=source.origin, file=ref.file, begin=begin, end=begin + size)


def merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield the pieces with neighbours in one file made one."""
    held: FileRange | None = None
    for piece in pieces:
        if isinstance(piece, bytes):
            if held is not None:
                yield held
                held = None
            yield piece
        elif held is not None and (held.origin, held.file, held.end) == (
            piece.origin,
            piece.file,
            piece.begin,
        ):
            held = FileRange(origin=held.origin, file=held.file, begin=held.begin, end=piece.end)
        else:
            if held is not None:
                yield held
            held = piece
    if held is not None:
        yield held
