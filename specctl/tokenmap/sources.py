"""Name the files of a corpus, their domains, and the parts of them that are read separately.

Invariants: the list depends on names and sizes, not on the machine or the number of workers; every
file is in one domain; nothing is left out without an entry in the report.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.text import printable
from specctl.tokenmap.listing import ListedFile, listed_files, suffix_of, unreadable

TASK_BYTES = 32 << 20
STDIN = "-"
TEXT_SUFFIXES = frozenset(
    re.findall(r"\S+", ".txt .md .rst .tex .html .xml .csv .tsv .pod .log .po .org .adoc")
)
CODE_SUFFIXES = frozenset(
    re.findall(
        r"\S+",
        ".py .pyi .c .h .cc .cpp .hpp .cu .rs .go .java .js .ts .tsx .jsx .rb .php .cs .swift .kt"
        " .scala .sh .bash .pl .pm .lua .r .jl .sql .css .m .hs .ml .ex .erl .clj .zig .toml .yaml"
        " .yml .json .ini .cmake .proto",
    )
)
LINE_SUFFIXES = frozenset({".jsonl", ".ndjson"})
COLUMN_SUFFIXES = frozenset({".parquet", ".arrow", ".feather"})
PACKED_SUFFIXES = frozenset({".gz", ".zst"})
ID_SUFFIXES = frozenset({".bin", ".npy"})
_PACKED_KINDS = TEXT_SUFFIXES | CODE_SUFFIXES | LINE_SUFFIXES
_READ_SUFFIXES = _PACKED_KINDS | COLUMN_SUFFIXES | {".npy"}
_STDIN = ListedFile(path=STDIN, real_path=STDIN, num_bytes=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file of a corpus.

    Args:
        path: of the file, `-` for standard input.
        domain: it belongs to.
        num_bytes: its size.
        held_out: the whole file measures coverage (`--held-out PATH`).
        is_named: by a path or pattern; a file of a directory is not.
    """

    path: str
    domain: str
    num_bytes: int
    held_out: bool = False
    is_named: bool = True

    @property
    def kind(self) -> str:
        """Suffix that decides the reader, that of compression left out."""
        return _kind_of(self.path)

    @property
    def is_packed(self) -> bool:
        """Whether the file is compressed as a whole."""
        return suffix_of(self.path).lower() in PACKED_SUFFIXES


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Files, or a range of lines or rows of one file, that one worker reads.

    Args:
        number: of the task, from 0.
        files: read one after another.
        begin: first byte (lines that begin at it or later) or row group; 0: from the start.
        end: byte or row group that is not read any more; None: to the end.
    """

    number: int
    files: tuple[SourceFile, ...]
    begin: int = 0
    end: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes on disk this task reads."""
        if self.end is not None and len(self.files) == 1:
            return self.end - self.begin
        return sum(file.num_bytes for file in self.files)


def find_files(arguments: Sequence[str], *, held_out: bool = False) -> tuple[SourceFile, ...]:
    """Return the files that `PATH`, `NAME=PATH` and quoted patterns name.

    An unnamed directory that is the only argument gives one domain for each directory in it.

    Raises:
        DiagnosticError: SD422 for each argument that names no file, SD423 for each that cannot be
            read.
    """
    found: dict[str, SourceFile] = {}
    problems: list[Diagnostic] = []
    for argument in arguments:
        try:
            files = _files_of(argument, held_out=held_out, is_only=len(arguments) == 1)
        except DiagnosticError as error:
            problems += error.diagnostics
            continue
        for real_path, file in files:
            known = found.setdefault(real_path, file)
            if file.is_named and not known.is_named:
                found[real_path] = replace(known, is_named=True)
    if not arguments:
        problems.append(diagnose("SD422", where="CORPUS", message="no corpus was named"))
    if problems:
        raise DiagnosticError(problems)
    return tuple(found.values())


def _files_of(argument: str, *, held_out: bool, is_only: bool) -> list[tuple[str, SourceFile]]:
    """Return the files of one argument, each with its path where links are resolved."""
    try:
        name, path = _named(argument)
        entries = [_STDIN] if path == STDIN else listed_files(path, _is_read)
        domains = _domains(path, name, is_only=is_only)
        is_named = not Path(path).expanduser().is_dir()
    except OSError as error:
        raise unreadable(str(error.filename or argument), error) from error
    if not entries:
        raise DiagnosticError(
            diagnose(
                "SD422",
                where=argument,
                message="no file of a corpus here",
                expected="a file, a directory with text, code, jsonl or parquet, a pattern",
                found="nothing that matches",
            )
        )
    return [
        (
            entry.real_path,
            SourceFile(
                path=entry.path,
                domain=printable(domains(entry.path)),
                num_bytes=entry.num_bytes,
                held_out=held_out,
                is_named=is_named,
            ),
        )
        for entry in entries
    ]


def without_arrays(files: Sequence[SourceFile]) -> tuple[SourceFile, ...]:
    """Return the files without arrays of token ids that only lie in a directory of texts.

    Packages bring arrays among their sources. An array that was named, or that weighs more than
    the texts, is wanted: then all files are returned.
    """
    texts = tuple(file for file in files if file.kind not in ID_SUFFIXES)
    arrays = [file for file in files if file.kind in ID_SUFFIXES]
    num_bytes = sum(file.num_bytes for file in arrays)
    is_wanted = any(file.is_named for file in arrays) or num_bytes >= sum(
        file.num_bytes for file in texts
    )
    return tuple(files) if is_wanted else texts


def _named(argument: str) -> tuple[str | None, str]:
    """Split `NAME=PATH`; a path that exists is never split."""
    name, mark, path = argument.partition("=")
    if mark and name and path and "/" not in name and not Path(argument).exists():
        return name, path
    return None, argument


def _domains(argument: str, name: str | None, *, is_only: bool) -> Callable[[str], str]:
    """Return what names the domain of each file of an argument."""
    root = Path(argument).expanduser()
    if name is not None or argument == STDIN:
        fixed = name or "stdin"
    elif root.is_dir():
        fixed = root.resolve().name or "root"
        if is_only:
            return lambda file: _first_directory(file, root) or fixed
    elif root.is_file():
        fixed = root.name.split(".")[0] or root.name
    else:
        return lambda file: Path(file).parent.name or "files"
    return lambda file: fixed


def _first_directory(file: str, root: Path) -> str:
    inside = file.removeprefix(str(root)).lstrip(os.sep) if str(root) != "." else file
    first, mark, _ = inside.partition(os.sep)
    return first if mark else ""


def _kind_of(name: str) -> str:
    suffix = suffix_of(name).lower()
    return suffix_of(name[: -len(suffix)]).lower() if suffix in PACKED_SUFFIXES else suffix


def _is_read(name: str) -> bool:
    kind = _kind_of(name)
    is_packed = suffix_of(name).lower() in PACKED_SUFFIXES
    return kind in (_PACKED_KINDS if is_packed else _READ_SUFFIXES)


def plan_tasks(files: Sequence[SourceFile], *, task_bytes: int = TASK_BYTES) -> tuple[Task, ...]:
    """Cut a corpus into tasks of about `task_bytes`; a large jsonl file into ranges of lines."""
    tasks: list[Task] = []
    group: list[SourceFile] = []
    size = 0

    def close() -> None:
        nonlocal size
        if group:
            tasks.append(Task(number=len(tasks), files=tuple(group)))
            group.clear()
            size = 0

    for file in files:
        is_lines = suffix_of(file.path).lower() in LINE_SUFFIXES
        if is_lines and file.num_bytes > 2 * task_bytes:
            close()
            for begin in range(0, file.num_bytes, task_bytes):
                end = min(begin + task_bytes, file.num_bytes)
                tasks.append(Task(number=len(tasks), files=(file,), begin=begin, end=end))
            continue
        if size + file.num_bytes > task_bytes:
            close()
        group.append(file)
        size += file.num_bytes
    close()
    return tuple(tasks)


def files_digest(files: Sequence[SourceFile], options: dict[str, str]) -> str:
    """Return a digest of what a run reads: names, sizes, times of change and options."""
    facts = []
    for file in files:
        facts.append([file.path, file.domain, file.num_bytes, file.held_out, _changed(file.path)])
    text = json.dumps([facts, options], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _changed(path: str) -> int:
    """Return when a file changed, 0 for standard input and for what cannot be looked at."""
    try:
        return 0 if path == STDIN else os.stat(path).st_mtime_ns  # noqa: PTH116
    except OSError:
        return 0
