"""The output directory: appears whole or not at all, never in a source, never over foreign files.

Invariants: everything is written into a hidden directory beside the output, flushed to disk and
renamed; on any exception, an interruption included, it is removed again with the parents that were
made for it. An existing output is replaced only when specctl wrote every file in it, as its
`PROVENANCE` says.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType

from specctl.checkpoint import Checkpoint, sync_directory
from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.contract.signals import handled

PROVENANCE = "specctl.json"
_SIGNALS = ("SIGTERM", "SIGHUP")


class Terminated(KeyboardInterrupt):
    """A signal asked the process to end; it unwinds like an interruption from the keyboard."""


def interruptible() -> AbstractContextManager[None]:
    """Turn SIGTERM and SIGHUP into `Terminated` while the body runs, so that it cleans up.

    Signals can be caught in the main thread only; elsewhere they keep what they do.
    """
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    return handled(numbers, _terminate)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(signal.Signals(number).name)


def check_apart(out: Path, checkpoints: Iterable[Checkpoint]) -> None:
    """Raise SD604 when the output is a source, lies in one or holds one; links are followed."""
    target = out.resolve()
    for checkpoint in checkpoints:
        for root in _roots(checkpoint):
            if target == root or target.is_relative_to(root) or root.is_relative_to(target):
                raise DiagnosticError(
                    diagnose(
                        "SD604",
                        where="--output",
                        message=f"`{out}` is, holds or lies inside the source",
                        expected="a directory outside the source",
                        found=str(out),
                    )
                )


def _roots(checkpoint: Checkpoint) -> set[Path]:
    """Return the directories that the source's files really lie in."""
    paths = [checkpoint.store.local_path(file.file) for file in checkpoint.files]
    roots = {path.resolve().parent for path in paths if path is not None}
    return roots if checkpoint.root is None else roots | {checkpoint.root.resolve()}


def check_replaceable(out: Path, *, is_forced: bool) -> None:
    """Raise SD603 when something is at `out` that may not be replaced."""
    if not os.path.lexists(out) or _is_empty(out):
        return
    is_ours = out.is_dir() and (out / PROVENANCE).is_file()
    foreign = _foreign(out) if is_ours else []
    if is_forced and is_ours and not foreign:
        return
    if foreign:
        found, help = f"`{foreign[0]}`, which specctl did not write", f"Move `{foreign[0]}` away"
    elif is_ours:
        found = "a directory that specctl wrote"
        help = f"Choose another output, or pass `--force` to replace `{out}`"
    else:
        found = "files that specctl did not write"
        help = f"Choose another output, or remove `{out}` yourself"
    raise DiagnosticError(
        diagnose(
            "SD603",
            where="--output",
            message=f"`{out}` exists and is not what this command writes",
            expected="a new or empty directory",
            found=found,
            help=help,
        )
    )


def _foreign(out: Path) -> list[str]:
    """Return the names in an output that its provenance does not list, sorted."""
    try:
        record = json.loads((out / PROVENANCE).read_bytes())
    except (ValueError, RecursionError):
        record = {}
    listed = record.get("files") if isinstance(record, dict) else None
    names = listed if isinstance(listed, list) else []
    known = {PROVENANCE, *(name for name in names if isinstance(name, str))}
    return sorted(path.name for path in out.iterdir() if path.name not in known)


def _is_empty(out: Path) -> bool:
    return out.is_dir() and not any(out.iterdir())


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """Yield a directory whose content becomes `out` when the block ends without exception.

    What is at `out` is replaced; ask `check_replaceable` before.

    Raises:
        DiagnosticError: SD605 when the system refuses, SD603 when `out` appeared meanwhile.
    """
    with _refusals(out), interruptible():
        home = out.absolute().parent
        made = [path for path in (home, *home.parents) if not path.exists()]
        token = os.urandom(6).hex()
        temporary = home / f".{out.name[:150]}.{token}.tmp"
        try:
            home.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
            yield temporary
            sync_directory(temporary)
            _rename(temporary, out, home / f".{out.name[:150]}.{token}.old")
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):  # another file was put there meanwhile
                for path in made:
                    path.rmdir()
            raise
        sync_directory(home)


def _rename(temporary: Path, out: Path, old: Path) -> None:
    """Put the new directory in place of what `check_replaceable` allowed to be replaced."""
    if not (out.is_dir() and (out / PROVENANCE).is_file()):
        temporary.rename(out)  # over nothing, or over an empty directory
        return
    out.rename(old)
    try:
        temporary.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _refusals(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DiagnosticError(
            diagnose(
                "SD605",
                where="--output",
                message=f"`{out}` cannot be written: {error.strerror or error}",
            )
        ) from error


def check_space(out: Path, size: int) -> None:
    """Raise SD605 when the file system has fewer free bytes than the output needs."""
    home = next(path for path in out.absolute().parents if path.exists())
    free = shutil.disk_usage(home).free
    if free < size:
        raise DiagnosticError(
            diagnose(
                "SD605",
                where="--output",
                message=f"`{out}` needs {size} bytes and {free} are free",
                expected=f"{size} bytes",
                found=f"{free} bytes",
            )
        )


def write_file_synced(path: Path, data: bytes) -> None:
    """Write a small new file and flush it to disk."""
    with path.open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
