"""The seam between a checkpoint's readers and the place of its files.

Invariants: a store is read-only; whatever goes wrong in it is a `DiagnosticError` with a place that
starts with the file's name, never an exception of a client library or of the system.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from specctl.contract.diagnostics import Diagnostic

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Needed = Callable[[bytes], int]
"""From the first `PREFETCH_BYTES` of a file, how many of its bytes a reader reads."""

PREFETCH_FILES = 128
"""Files that are prefetched at once at most, so that memory stays bounded."""

PREFETCH_BYTES = 512
"""Bytes that `FileStore.prefetch` passes on to find out how many a reader needs."""


class StoredFile(Protocol):
    """One file, open for reading byte ranges."""

    @property
    def size(self) -> int:
        """Bytes of the file when it was opened."""

    def read_at(self, begin: int, end: int) -> bytes:
        """Return the bytes of [begin, end), fewer when the file ends earlier.

        Raises:
            DiagnosticError: SD135, or what the hub answered.
        """

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Get many small ranges that are read next, where waiting for each would be slow.

        Raises:
            DiagnosticError: SD149 when they are too many, or what the hub answered.
        """

    def close(self) -> None:
        """Let go of the file."""

    def __enter__(self) -> StoredFile:
        """Return itself."""

    def __exit__(self, *details: object) -> None:
        """Close it."""


class FileStore(Protocol):
    """The files of one checkpoint."""

    @property
    def identity(self) -> str:
        """What diagnostics call it: a path, or `hf:org/name@revision`."""

    @property
    def revision(self) -> str | None:
        """Commit the files belong to, None when nothing says so."""

    @property
    def root(self) -> Path | None:
        """The directory of a local store."""

    @property
    def trouble(self) -> Diagnostic | None:
        """Why nothing more can be read, None while all is well."""

    def unfinished(self) -> tuple[str, ...]:
        """Return what interrupted downloads left, as paths for the user to look at."""

    def sizes(self) -> Mapping[str, int]:
        """Return the names directly in the directory, sorted and without hidden ones, and sizes.

        Raises:
            DiagnosticError: SD135, or what the hub answered.
        """

    def has(self, name: str) -> bool:
        """Tell whether there is such a file; `name` is relative and may lie in a subdirectory."""

    def why_outside(self, name: str) -> str | None:
        """Return why a relative name without `..` leads out of the store, None when it does not."""

    def open(self, name: str) -> StoredFile:
        """Open a file for reading ranges.

        Raises:
            DiagnosticError: SD135, or what the hub answered.
        """

    def prefetch(self, wanted: Mapping[str, Needed | None]) -> None:
        """Get the beginnings of files that are opened next, where waiting for each would be slow.

        Raises nothing: the file is asked again when it is opened, and that says what is wrong.

        Args:
            wanted: name -> how many bytes of it will be read, None for all of them.
        """

    def local_path(self, name: str) -> Path | None:
        """Return the file's path when its bytes are on this machine already."""

    def fetch(self, name: str) -> Path:
        """Return a path of this machine with the file's bytes, downloading it when needed.

        Raises:
            DiagnosticError: SD135, or what the hub answered.
        """


class RangeStream(io.RawIOBase):
    """A `StoredFile` as a seekable binary stream, for readers of the standard library."""

    def __init__(self, stored: StoredFile) -> None:
        """Start at the beginning of `stored`, which stays open when the stream is closed."""
        self._stored = stored
        self._place = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset counted as `whence` says; OSError before the beginning."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._stored.size}[whence]
        if base + offset < 0:
            raise OSError("seek before the beginning of the file")
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        """Return the offset."""
        return self._place

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill `buffer` from the current offset; 0 at the end of the file."""
        view = memoryview(buffer).cast("B")
        data = self._stored.read_at(self._place, self._place + len(view))
        view[: len(data)] = data
        self._place += len(data)
        return len(data)
