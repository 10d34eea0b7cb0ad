"""List the files that a path or a pattern names, with one look at each.

Invariants: sorted by path inside the directory, whatever the file system gives; hidden entries and
linked directories are left out of a directory; a directory that cannot be read is SD423 however it
is named.
"""

from __future__ import annotations

import errno
import glob
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specctl.contract.diagnostics import DiagnosticError, diagnose


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedFile:
    """One file that was found.

    Args:
        path: as it was found.
        real_path: links resolved; the same for two names of one file.
        num_bytes: its size.
    """

    path: str
    real_path: str
    num_bytes: int


def listed_files(source: str, is_read: Callable[[str], bool]) -> list[ListedFile]:
    """Return the files that a path or pattern names, sorted; of a directory those `is_read`.

    Args:
        source: a file, a directory or a pattern with `*`, `?` or `[`.
        is_read: tells from a file's name whether it is taken from a directory.

    Raises:
        DiagnosticError: SD423 for a directory that cannot be read, or a link to nothing.
        OSError: the system does not say what the path is.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [_listed(path)]
    if path.is_dir():
        prefix = len(str(path)) if str(path) != "." else 0
        inside = _inside(str(path), str(path.resolve()), is_read)
        return sorted(inside, key=lambda file: file.path[prefix:].replace(os.sep, "/").lstrip("/"))
    if glob.has_magic(source):
        _refuse_closed_directories(path)
        found = (_listed(match) for match in _matches(path) if match.is_file())
        return sorted(found, key=lambda file: file.path)
    if path.is_symlink() and not path.exists():
        raise unreadable(str(path), FileNotFoundError(errno.ENOENT, ""))
    return []


def unreadable(where: str, error: OSError, what: str = "") -> DiagnosticError:
    """Return the SD423 for what the system does not let read.

    Args:
        where: its path.
        error: of the system, with its number.
        what: it is, before the words.
    """
    message = f"{what} cannot be read: {reason_of(error)}".lstrip()
    return DiagnosticError(diagnose("SD423", where=where, message=message))


def reason_of(error: OSError) -> str:
    """Return what the system says; pyarrow's own words hold the path, too."""
    return os.strerror(error.errno or errno.EIO)


def suffix_of(name: str) -> str:
    """Return the last suffix of a file name or path with its dot, as `Path.suffix` does."""
    stem, dot, end = name.rpartition(".")
    if not stem or not end or stem[-1] in "/\\" or "/" in end or "\\" in end:
        return ""
    return dot + end


def _listed(path: Path) -> ListedFile:
    return ListedFile(path=str(path), real_path=str(path.resolve()), num_bytes=path.stat().st_size)


def _inside(path: str, real_path: str, is_read: Callable[[str], bool]) -> Iterator[ListedFile]:
    """Yield the files below a directory, in no order."""
    for entry in _entries(path):
        if entry.name.startswith("."):
            continue
        inside = entry.name if path == "." else entry.path
        real = f"{real_path}{os.sep}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from _inside(inside, real, is_read)
        elif is_read(entry.name) and (num_bytes := _file_size(entry)) is not None:
            if entry.is_symlink():
                real = os.path.realpath(entry.path)
            yield ListedFile(path=inside, real_path=real, num_bytes=num_bytes)


def _entries(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except OSError as error:
        raise unreadable(path, error, "the directory") from error


def _refuse_closed_directories(pattern: Path) -> None:
    """Refuse a pattern over directories that cannot be read; `glob` passes over them in silence."""
    for place, part in enumerate(pattern.parts):
        if not glob.has_magic(part):
            continue
        for parent in _matches(Path(*pattern.parts[:place])):
            if parent.is_dir():
                _refuse_closed(str(parent), is_deep=part == "**")
        if part == "**":
            return


def _matches(pattern: Path) -> Iterator[Path]:
    # The user's own pattern may be absolute, which Path.glob refuses.
    return (Path(name) for name in glob.glob(str(pattern), recursive=True))  # noqa: PTH207


def _refuse_closed(path: str, *, is_deep: bool) -> None:
    for entry in _entries(path):
        is_inside = is_deep and not entry.name.startswith(".")
        if is_inside and entry.is_dir(follow_symlinks=False):
            _refuse_closed(entry.path, is_deep=True)


def _file_size(entry: os.DirEntry[str]) -> int | None:
    """Return a file's size, None for what is no file; a broken link is 0, and reading names it."""
    try:
        status = entry.stat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else None
