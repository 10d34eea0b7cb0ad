"""Open weight files of the sources, each once, and move ranges of them into an output file.

Invariants: a range of a local file goes through the kernel (`copy_file_range`) when nobody wants
its bytes, else through two buffers of `LOCAL_BYTES`; a file on a hub is read in pieces of
`CHUNK_BYTES`. A file whose size or time changed while it was read is SD606.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

from specctl.checkpoint import Checkpoint
from specctl.checkpoint.checkpoint import cut_short
from specctl.checkpoint.sources import StoredFile
from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.convert.output_stream import OutputStream
from specctl.convert.pieces import FileRange
from specctl.formats.written import Origin

CHUNK_BYTES = 8 << 20  # of a hub, and of what is gathered
LOCAL_BYTES = 512 << 10  # stays in the processor's cache between reading, hashing and writing
KERNEL_BYTES = 32 << 20  # a signal is answered between two calls
_NO_KERNEL_COPY = frozenset(
    {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Local:
    descriptor: int
    size: int
    changed_ns: int


Moved = Callable[[int], None]


class SourceFiles:
    """The weight files of the sources, opened when they are first read."""

    def __init__(self, checkpoints: Mapping[Origin, Checkpoint], *, moved: Moved) -> None:
        """Stand for the sources; nothing is opened yet.

        Args:
            checkpoints: the sources.
            moved: told the bytes that were read, as they are.
        """
        self._checkpoints = checkpoints
        self._moved = moved
        self._local: dict[tuple[Origin, str], _Local] = {}
        self._stored: dict[tuple[Origin, str], StoredFile] = {}
        self._stack = ExitStack()
        self._is_kernel_copy = hasattr(os, "copy_file_range")

    def copy(self, piece: FileRange, out: OutputStream) -> None:
        """Append a range to the output."""
        local = self._open(piece)
        if local is not None and self._is_kernel_copy:
            self._copy_in_kernel(piece, local, out)
            return
        for data in self.read(piece):
            out.write(data)

    def read(self, piece: FileRange, chunk_bytes: int | None = None) -> Iterator[memoryview]:
        """Yield the bytes of a range; a yielded view is valid until the one after the next."""
        local = self._open(piece)
        if local is None:
            yield from self._read_stored(piece, chunk_bytes or CHUNK_BYTES)
            return
        length = min(chunk_bytes or LOCAL_BYTES, max(piece.end - piece.begin, 1))
        buffers = [memoryview(bytearray(length)) for _ in range(2)]
        begin, turn = piece.begin, 0
        while begin < piece.end:
            view = buffers[turn][: min(length, piece.end - begin)]
            count = _read_into(local.descriptor, view, begin, piece.file)
            self._moved(count)
            yield view[:count]
            begin += count
            turn = 1 - turn

    def check_unchanged(self) -> None:
        """Raise SD606 when a local file has another size or time than when it was opened."""
        for (_, file), local in self._local.items():
            status = os.fstat(local.descriptor)
            if (status.st_size, status.st_mtime_ns) != (local.size, local.changed_ns):
                raise DiagnosticError(
                    diagnose(
                        "SD606",
                        where=file,
                        message="the file was changed while it was read; the output was removed",
                        expected=f"{local.size} bytes, unchanged",
                        found=f"{status.st_size} bytes, another time",
                    )
                )

    def __enter__(self) -> SourceFiles:
        """Return itself."""
        return self

    def __exit__(self, *details: object) -> None:
        """Close every file."""
        self._stack.close()

    def _open(self, piece: FileRange) -> _Local | None:
        key = (piece.origin, piece.file)
        if key in self._local:
            return self._local[key]
        if key in self._stored:
            return None
        store = self._checkpoints[piece.origin].store
        path = store.local_path(piece.file)
        if path is None:
            self._stored[key] = self._stack.enter_context(store.open(piece.file))
            return None
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._stack.callback(os.close, descriptor)
            status = os.fstat(descriptor)
        except OSError as error:
            raise _unreadable(piece.file, error.strerror) from error
        if not stat.S_ISREG(status.st_mode):
            raise _unreadable(piece.file, "not a regular file")
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        local = _Local(descriptor=descriptor, size=status.st_size, changed_ns=status.st_mtime_ns)
        self._local[key] = local
        return local

    def _copy_in_kernel(self, piece: FileRange, local: _Local, out: OutputStream) -> None:
        begin = piece.begin
        while begin < piece.end:
            count = min(KERNEL_BYTES, piece.end - begin)
            try:
                moved = os.copy_file_range(
                    local.descriptor, out.descriptor, count, offset_src=begin
                )
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
                moved = 0
            if moved == 0:  # not between these file systems, or the file ends: reading tells
                self._is_kernel_copy = False
                for data in self.read(replace(piece, begin=begin)):
                    out.write(data)
                return
            self._moved(moved)
            out.advance(moved)
            begin += moved

    def _read_stored(self, piece: FileRange, chunk_bytes: int) -> Iterator[memoryview]:
        stored = self._stored[piece.origin, piece.file]
        begin = piece.begin
        while begin < piece.end:
            data = stored.read_at(begin, min(begin + chunk_bytes, piece.end))
            if not data:
                raise cut_short(piece.file, begin, piece.end)
            self._moved(len(data))
            yield memoryview(data)
            begin += len(data)


def _read_into(descriptor: int, view: memoryview, begin: int, file: str) -> int:
    try:
        count = os.preadv(descriptor, [view], begin)
    except OSError as error:
        raise _unreadable(file, error.strerror) from error
    if count == 0:
        raise cut_short(file, begin, begin + len(view))
    return count


def _unreadable(file: str, reason: str | None) -> DiagnosticError:
    return DiagnosticError(diagnose("SD135", where=file, message=f"cannot be read: {reason}"))
