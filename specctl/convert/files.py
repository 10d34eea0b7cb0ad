"""Write one weight file from its plan, or compare a file with its plan.

Invariants: the bytes depend on plan and sources only. Digests are taken while the bytes pass, in a
second thread, because hashing and writing take about as long; gathered rows are written in the
order of the source, so their digest is taken from what was written.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from specctl.convert.layout import OutputFile
from specctl.convert.output_stream import OutputStream
from specctl.convert.pieces import FileRange, merged, pieces_of, row_bytes
from specctl.convert.reading import CHUNK_BYTES, SourceFiles
from specctl.formats.written import Rows, TensorSource, num_bytes

GAP_BYTES = 1 << 20  # rows nearer than this are read in one go with what lies between
_THREAD_BYTES = 1 << 20  # a smaller tensor is hashed where it is
_MAX_VIEWS = 1000  # below IOV_MAX, the views that one system call takes


class _Hash(Protocol):
    def update(self, data: memoryview, /) -> None:
        """Take in more bytes."""

    def hexdigest(self) -> str:
        """Return the digest so far."""


def write_file(
    directory: Path, file: OutputFile, sources: SourceFiles, *, has_digests: bool
) -> Mapping[str, str]:
    """Write a weight file and flush it to disk; return key -> digest of each tensor.

    Args:
        directory: where; the file must not exist.
        file: the plan.
        sources: open sources.
        has_digests: else nothing is returned and bytes go through the kernel only.

    Raises:
        DiagnosticError: a source cannot be read.
        OSError: the output cannot be written.
    """
    with OutputStream(directory / file.name) as out:
        out.write(file.header)
        digests = (
            _write_hashed(out, file, sources) if has_digests else _write_plain(out, file, sources)
        )
        out.finish()
    return digests


def _write_plain(out: OutputStream, file: OutputFile, sources: SourceFiles) -> Mapping[str, str]:
    for run in _runs(file):
        if isinstance(run, Rows):
            gather(run, out, sources)
            continue
        for piece in merged(piece for source in run for piece in pieces_of(source)):
            if isinstance(piece, bytes):
                out.write(piece)
            else:
                sources.copy(piece, out)
    return {}


def _runs(file: OutputFile) -> Iterator[Rows | list[TensorSource]]:
    """Yield gathered tensors one by one, all others in runs whose neighbours become one piece."""
    run: list[TensorSource] = []
    for source in file.tensors.values():
        if not isinstance(source, Rows):
            run.append(source)
            continue
        yield run
        yield source
        run = []
    yield run


def _write_hashed(out: OutputStream, file: OutputFile, sources: SourceFiles) -> Mapping[str, str]:
    digests: dict[str, str] = {}
    with ThreadPoolExecutor(max_workers=1) as pool:
        for key, source in file.tensors.items():
            digest = hashlib.sha256()
            if isinstance(source, Rows):
                begin = os.lseek(out.descriptor, 0, os.SEEK_CUR)
                gather(source, out, sources)
                _hash_written(out, begin, digest)
            else:
                _write_tensor(out, source, sources, digest, pool)
            digests[key] = "sha256:" + digest.hexdigest()
    return digests


def _write_tensor(
    out: OutputStream,
    source: TensorSource,
    sources: SourceFiles,
    digest: _Hash,
    pool: ThreadPoolExecutor,
) -> None:
    is_small = num_bytes(source) < _THREAD_BYTES
    pending: Future[None] | None = None
    for view in tensor_views(source, sources):
        if is_small:
            digest.update(view)
            out.write(view)
            continue
        hashing = pool.submit(digest.update, view)
        out.write(view)
        if pending is not None:  # the buffer of the view before is filled again next
            pending.result()
        pending = hashing
    if pending is not None:
        pending.result()


def _hash_written(out: OutputStream, begin: int, digest: _Hash) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while count := os.preadv(out.descriptor, [buffer], begin):
        digest.update(buffer[:count])
        begin += count


def tensor_views(source: TensorSource, sources: SourceFiles) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in output order; a view is valid until the one after the next."""
    for piece in pieces_of(source):
        if isinstance(piece, bytes):
            yield memoryview(piece)
        else:
            yield from sources.read(piece)


def gather(source: Rows, out: OutputStream, sources: SourceFiles) -> None:
    """Append rows of a matrix: read in the order of the file, written to their places."""
    size = row_bytes(source)
    start = os.lseek(out.descriptor, 0, os.SEEK_CUR)
    order = sorted(range(len(source.rows)), key=source.rows.__getitem__)
    for window in _windows(source.rows, order, size):
        first = source.ref.begin + source.rows[window[0]] * size
        end = source.ref.begin + (source.rows[window[-1]] + 1) * size
        piece = FileRange(origin=source.origin, file=source.ref.file, begin=first, end=end)
        data = _whole(piece, sources)
        views = [(p, _row(data, source, p, first, size)) for p in window]
        _scatter(out, views, start, size)
    os.lseek(out.descriptor, start + size * len(source.rows), os.SEEK_SET)


def _row(data: memoryview, source: Rows, place: int, first: int, size: int) -> memoryview:
    offset = source.ref.begin + source.rows[place] * size - first
    return data[offset : offset + size]


def _windows(rows: tuple[int, ...], order: list[int], size: int) -> Iterator[list[int]]:
    """Yield places of rows that are read together: near each other, and at most a chunk."""
    window: list[int] = []
    for place in order:
        if window and (
            (rows[place] - rows[window[-1]] - 1) * size > GAP_BYTES
            or (rows[place] - rows[window[0]] + 1) * size > CHUNK_BYTES
        ):
            yield window
            window = []
        window.append(place)
    if window:
        yield window


def _whole(piece: FileRange, sources: SourceFiles) -> memoryview:
    length = piece.end - piece.begin
    views = sources.read(piece, chunk_bytes=max(length, 1))
    first = next(views)
    if len(first) == length:
        return first
    data = bytearray(first)  # a short read; the rest follows
    for view in views:
        data += view
    return memoryview(data)


def _scatter(out: OutputStream, views: list[tuple[int, memoryview]], start: int, size: int) -> None:
    run: list[memoryview] = []
    begin = 0
    for place, view in views:
        if run and (place != begin + len(run) or len(run) == _MAX_VIEWS):
            _write_run(out, run, start + begin * size)
            run = []
        if not run:
            begin = place
        run.append(view)
    if run:
        _write_run(out, run, start + begin * size)


def _write_run(out: OutputStream, run: list[memoryview], offset: int) -> None:
    expected = sum(len(view) for view in run)
    written = os.pwritev(out.descriptor, run, offset)
    while written < expected:  # rare; a signal or a nearly full disk
        rest = memoryview(b"".join(run))[written:]
        written += os.pwrite(out.descriptor, rest, offset + written)
    out.advance(written)


def is_same_file(path: Path, file: OutputFile, sources: SourceFiles) -> bool:
    """Tell whether an existing file has exactly the bytes of the plan."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size != file.size:
        return False
    with path.open("rb") as stream:
        if stream.read(len(file.header)) != file.header:
            return False
        return all(
            stream.read(len(view)) == view
            for source in file.tensors.values()
            for view in tensor_views(source, sources)
        )
