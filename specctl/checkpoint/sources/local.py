"""A directory of this machine as a file store.

Invariants: only regular files are opened (a FIFO of a weight file's name would block for ever); a
hub cache keeps its files as links from `snapshots/REVISION/` into the `blobs/` next to it, and
those links stay inside.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from specctl.checkpoint.sources.store import Needed
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

_HF_DOWNLOADS = ".cache/huggingface/download"
_MODELSCOPE_DOWNLOADS = "._____temp"
_UNFINISHED = (".incomplete", ".parallel_tmp", ".aria2", ".crdownload", ".part", ".partial")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class LocalFile:
    """A regular file, open for reading ranges."""

    def __init__(self, path: Path, *, where: str) -> None:
        """Open `path`.

        Args:
            path: the file.
            where: place for diagnostics.

        Raises:
            DiagnosticError: SD135 when the system refuses or it is no regular file.
        """
        self._where = where
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise _refused(where, error) from error
        try:
            status = os.fstat(self._descriptor)
        except OSError as error:
            self.close()
            raise _refused(where, error) from error
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise DiagnosticError(diagnose("SD135", where=where, message="not a regular file"))
        self.size = status.st_size

    def read_at(self, begin: int, end: int) -> bytes:
        """Return the bytes of [begin, end), fewer when the file ends earlier; SD135."""
        length = min(end, self.size) - begin  # compared first: nothing is allocated for a cut range
        if length <= 0:
            return b""
        try:
            data = os.pread(self._descriptor, length, begin)
            while len(data) < length:
                more = os.pread(self._descriptor, length - len(data), begin + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise _refused(self._where, error) from error
        return data

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing: a read of this disk is not worth hiding."""

    def close(self) -> None:
        """Close the descriptor."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> LocalFile:
        """Return itself."""
        return self

    def __exit__(self, *details: object) -> None:
        """Close it."""
        self.close()


class LocalStore:
    """The files in one directory."""

    trouble: Diagnostic | None = None

    def __init__(
        self, root: Path, *, identity: str | None = None, revision: str | None = None
    ) -> None:
        """Stand for `root`; nothing is read yet.

        Args:
            root: the directory.
            identity: what diagnostics call it; the directory when None.
            revision: what the hub's client says; the commit of a snapshot's path when None.
        """
        self.root = root
        self.identity = str(root) if identity is None else identity
        self._snapshot = _snapshot_of(root)
        is_commit = self._snapshot is not None and _COMMIT.fullmatch(self._snapshot.name)
        commit = self._snapshot.name if self._snapshot is not None and is_commit else None
        self.revision = commit if revision is None else revision

    def unfinished(self) -> tuple[str, ...]:
        """Return what interrupted downloads left in the directory and in its hub cache."""
        places = [self.root, self.root / _HF_DOWNLOADS, self.root / _MODELSCOPE_DOWNLOADS]
        if self._snapshot is not None:
            places.append(self._snapshot.parents[1] / "blobs")
        return tuple(
            str(path)
            for place in places
            for path in _children(place)
            if path.name.endswith(_UNFINISHED) or place.name == _MODELSCOPE_DOWNLOADS
        )

    def sizes(self) -> Mapping[str, int]:
        """Return names (without hidden ones, sorted) and sizes; SD135."""
        found: dict[str, int] = {}
        try:
            with os.scandir(self.root) as entries:
                for entry in entries:
                    if not entry.name.startswith("."):
                        found[entry.name] = _size(entry)
        except OSError as error:
            raise DiagnosticError(
                diagnose(
                    "SD135", where=str(self.root), message=f"cannot be listed: {error.strerror}"
                )
            ) from error
        return MappingProxyType(dict(sorted(found.items())))

    def has(self, name: str) -> bool:
        """Tell whether something of that name exists; a link to nothing does not."""
        try:
            return (self.root / name).exists()
        except (OSError, ValueError):
            return False

    def why_outside(self, name: str) -> str | None:
        """Return why `name` leads out of the directory; links are followed."""
        try:
            if "/" not in name and name not in ("", ".", "..") and not self._is_link(name):
                return None
            home = self.root.resolve()
            target = (home / name).resolve()
        except (OSError, ValueError, RuntimeError):
            return "cannot be resolved"
        roots = [home]
        if self._snapshot is not None:
            roots.append(self._snapshot.resolve().parents[1] / "blobs")
        if any(target.is_relative_to(root) for root in roots) or _is_cached(target):
            return None
        return "is a link that leaves the directory"

    def open(self, name: str) -> LocalFile:
        """Open a file for reading ranges; SD135, SD128 for a link that leaves the directory."""
        try:
            reason = self.why_outside(name) if self._is_link(name) else None
        except (OSError, ValueError):  # a name that the system refuses is refused again below
            reason = None
        if reason is not None:
            raise DiagnosticError(
                diagnose(
                    "SD128",
                    where=name,
                    message=f"`{name}` {reason}",
                    expected="a file inside the checkpoint's directory",
                    found="a link",
                )
            )
        return LocalFile(self.root / name, where=name)

    def _is_link(self, name: str) -> bool:
        return Path(f"{self.root}/{name}").is_symlink()

    def prefetch(self, wanted: Mapping[str, Needed | None]) -> None:
        """Do nothing: a read of this disk is not worth hiding."""

    def local_path(self, name: str) -> Path | None:
        """Return the file's path."""
        return self.root / name

    def fetch(self, name: str) -> Path:
        """Return the file's path."""
        return self.root / name


def _snapshot_of(root: Path) -> Path | None:
    """Return the `snapshots/REVISION` directory of a hub cache at or above `root`."""
    home = root.absolute()
    for place in (home, *home.parents):
        if place.parent.name == "snapshots" and place.parent != place:
            return place
    return None


def _children(place: Path) -> list[Path]:
    try:
        return sorted(place.iterdir())
    except OSError:  # absent, as it usually is
        return []


def _is_cached(target: Path) -> bool:
    """Tell whether `target` is in a hub cache; older clients fill `--local-dir` with links."""
    folder = target.parent
    return folder.name == "blobs" and folder.parent.name.startswith("models--")


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except OSError:  # a link to nothing; opening it says so
        return 0


def _refused(where: str, error: OSError | ValueError) -> DiagnosticError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return DiagnosticError(diagnose("SD135", where=where, message=f"cannot be read: {reason}"))
