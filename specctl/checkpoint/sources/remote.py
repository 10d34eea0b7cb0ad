"""A repository of a hub as a file store: headers and small tensors by ranged reads.

Invariants: a file is never read beyond what a reader asks for, except for the first `HEAD_BYTES`
and the last `TAIL_BYTES`, which cost one request and usually spare the next; once the hub cannot be
read at all, every further read fails at once with the same reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from specctl.checkpoint.sources.hub import Hub, HubError, Listing
from specctl.checkpoint.sources.local import LocalFile
from specctl.checkpoint.sources.ranges import Got, Pause, read_range
from specctl.checkpoint.sources.store import PREFETCH_BYTES, PREFETCH_FILES, Needed, StoredFile
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

HEAD_BYTES = 100_000
"""Nearly every header is shorter, so that its length and itself are one request."""

TAIL_BYTES = 65_536
MAX_EXPECTED = 256
MAX_WHOLE_BYTES = 100_000_000  # a JSON file above it is refused by its size
MAX_AHEAD_BYTES = 4 << 20  # of a longer header the rest is got when it is read
MAX_OPEN = 2 * PREFETCH_FILES
WORKERS = 8

_Read = Callable[[int, int], Got]


class RemoteFile:
    """A file of a hub, open for reading ranges."""

    def __init__(self, read: _Read, *, where: str, size: int | None) -> None:
        """Stand for a file; asks for its beginning when its size is not known.

        Args:
            read: gets a range from the hub, raises DiagnosticError.
            where: place for diagnostics.
            size: bytes as the hub lists them, None when it does not say.

        Raises:
            DiagnosticError: what the hub answered.
        """
        self._read = read
        self._where = where
        self._head = b""
        self._tail: tuple[int, bytes] | None = None
        self._expected: dict[tuple[int, int], bytes] = {}
        self._is_confirmed = False
        self.size = HEAD_BYTES if size is None else size
        if size is None:
            self._grow_head(HEAD_BYTES, is_listed=False)

    def read_at(self, begin: int, end: int) -> bytes:
        """Return the bytes of [begin, end), fewer when the file ends earlier."""
        end = min(end, self.size)
        if begin >= end:
            return b""
        if (begin, end) in self._expected:
            return self._expected[begin, end]
        if begin == 0 or begin < len(self._head):
            if end > len(self._head):
                self._grow_head(end)
            return self._head[begin:end]
        tail_begin = max(0, self.size - TAIL_BYTES)
        if begin < tail_begin or end - begin >= TAIL_BYTES:
            return self._get(begin, end).data
        if self._tail is None:
            self._tail = (tail_begin, self._get(tail_begin, self.size).data)
        return self._tail[1][begin - self._tail[0] : end - self._tail[0]]

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Get many small ranges at once; see `StoredFile.expect`."""
        missing = [r for r in ranges if r[1] > len(self._head) and r not in self._expected]
        if len(missing) > MAX_EXPECTED:
            raise DiagnosticError(
                diagnose(
                    "SD149",
                    where=self._where,
                    message=f"{len(missing)} tensors would be {len(missing)} requests",
                    expected=f"at most {MAX_EXPECTED}",
                    found=len(missing),
                )
            )
        with ThreadPoolExecutor(WORKERS) as pool:
            found = pool.map(lambda r: self._get(*r).data, missing)
            self._expected.update(zip(missing, found, strict=True))

    def _grow_head(self, end: int, *, is_listed: bool = True) -> None:
        wanted = max(end, HEAD_BYTES)
        if is_listed:
            wanted = min(wanted, self.size)
        have = len(self._head)
        got = self._get(have, wanted, is_listed=is_listed)
        self._head += got.data
        if not is_listed:
            self.size = len(self._head) if got.size is None else got.size

    def _get(self, begin: int, end: int, *, is_listed: bool = True) -> Got:
        got = self._read(begin, end)
        if is_listed and got.size is not None and got.size != self.size:
            raise DiagnosticError(
                diagnose(
                    "SD144",
                    where=self._where,
                    message="the file has another size than the hub lists for it",
                    expected=f"{self.size} bytes",
                    found=f"{got.size} bytes",
                )
            )
        return got

    def close(self) -> None:
        """Keep the first bytes, which the next reader asks for again, and drop the rest."""
        self._head = self._head[:HEAD_BYTES]
        self._expected = {}

    def __enter__(self) -> RemoteFile:
        """Return itself."""
        return self

    def __exit__(self, *details: object) -> None:
        """Close it."""
        self.close()


class RemoteStore:
    """The files of one directory of a repository."""

    root: Path | None = None

    def __init__(self, hub: Hub, listing: Listing, *, pause: Pause = time.sleep) -> None:
        """Stand for the repository at the listing's revision.

        Args:
            hub: the client.
            listing: its files.
            pause: waits between attempts.
        """
        self._hub = hub
        self._kind = hub.name.kind
        self._listing = listing
        self._pause = pause
        self._open: dict[str, RemoteFile] = {}
        self._lost: HubError | None = None
        prefix = hub.name.path_of("")
        self._sizes = {
            path[len(prefix) :]: size
            for path, size in sorted(listing.sizes.items())
            if path.startswith(prefix)
        }

    @property
    def identity(self) -> str:
        """The source's spelling, pinned to the revision."""
        return self._hub.name.text(self._listing.pinned or self._listing.revision)

    @property
    def revision(self) -> str | None:
        """Commit of the files on Hugging Face; the branch or tag on ModelScope."""
        return self._listing.pinned

    @property
    def trouble(self) -> Diagnostic | None:
        """Why nothing more can be read, None while the hub answers."""
        return (
            None
            if self._lost is None
            else self._lost.diagnostic(self._hub.name.text(None), self._kind)
        )

    def unfinished(self) -> tuple[str, ...]:
        """Return nothing: a hub holds whole files."""
        return ()

    def sizes(self) -> Mapping[str, int]:
        """Return names directly in the directory and sizes; 0 where the hub does not say."""
        return MappingProxyType(
            {
                name: size or 0
                for name, size in self._sizes.items()
                if "/" not in name and not name.startswith(".")
            }
        )

    def has(self, name: str) -> bool:
        """Tell whether the repository lists such a file."""
        return name in self._sizes

    def why_outside(self, name: str) -> str | None:
        """Return None: a name is looked up in the hub's list, and there are no links."""
        return None

    def open(self, name: str) -> StoredFile:
        """Open a file for reading ranges, from the client's cache when it is there."""
        path = self.local_path(name)
        if path is not None:
            return LocalFile(path, where=name)
        if name not in self._open:
            if name not in self._sizes:
                raise DiagnosticError(
                    HubError("file", f"`{name}` is not in the repository").diagnostic(
                        name, self._kind
                    )
                )
            self._open[name] = RemoteFile(
                lambda begin, end: self._read(name, begin, end),
                where=name,
                size=self._sizes[name],
            )
        return self._open[name]

    def prefetch(self, wanted: Mapping[str, Needed | None]) -> None:
        """Get the beginnings of files with a bounded number of connections."""

        def get(name: str, needed: Needed | None) -> None:
            try:
                stored = self.open(name)  # left open: closing drops what was got
                if needed is not None:
                    length = needed(stored.read_at(0, PREFETCH_BYTES))
                    stored.read_at(0, min(length, MAX_AHEAD_BYTES))
                elif stored.size <= MAX_WHOLE_BYTES:
                    stored.read_at(0, stored.size)
            except DiagnosticError:
                return  # the reader meets it again and reports it at its place

        while len(self._open) + len(wanted) > MAX_OPEN and self._open:
            del self._open[next(iter(self._open))]  # read long ago; its first bytes go with it
        if len(wanted) > 1:
            with ThreadPoolExecutor(min(WORKERS, len(wanted))) as pool:
                list(pool.map(get, wanted.keys(), wanted.values()))

    def local_path(self, name: str) -> Path | None:
        """Return the file in the client's cache when it is there."""
        return self._hub.cached(self._hub.name.path_of(name), self._listing.revision)

    def fetch(self, name: str) -> Path:
        """Download a file into the client's cache, or find it there."""
        try:
            return self._hub.download(self._hub.name.path_of(name), self._listing.revision)
        except HubError as error:
            raise DiagnosticError(error.diagnostic(name, self._kind)) from error

    def _read(self, name: str, begin: int, end: int) -> Got:
        if self._lost is not None:
            raise DiagnosticError(self._lost.diagnostic(name, self._kind))
        path = self._hub.name.path_of(name)
        try:
            return read_range(
                self._hub, path, self._listing.revision, begin, end, pause=self._pause
            )
        except HubError as error:
            if not error.is_of_one_file:
                self._lost = error
            raise DiagnosticError(error.diagnostic(name, self._kind)) from error
