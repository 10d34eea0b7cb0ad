"""The opened checkpoint: its config, its tensor table and byte-range reads.

Invariants: frozen and complete; holds no tensor data; reads touch only the range of one tensor.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specctl.checkpoint.json_text import read_object
from specctl.checkpoint.sources.local import LocalFile
from specctl.checkpoint.sources.store import FileStore, StoredFile
from specctl.checkpoint.tensor_entry import INT_TYPECODES, TensorEntry, unpack_ints
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.findings import Findings
from specctl.contract.manifest import WeightFile

Container = Literal["safetensors", "pickle", "none"]
Layout = Literal["single", "sharded"]

MAX_ID_LIST_BYTES = 64 << 20  # eight million int64 ids; the largest vocabularies have 262,144
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A config and weights, as far as they could be read, wherever they lie.

    Args:
        store: where the files are; every read goes through it.
        file_names: names directly in the directory, sorted, hidden ones left out.
        config: config.json's object, None when absent or unreadable.
        config_digest: `sha256:` of config.json's bytes, None when absent.
        tensors: tensor name -> entry.
        files: the weight files that were read.
        container: how the weights are stored; `none` when there are none.
        layout: one file, or several with an index.
        diagnostics: everything found while opening.
    """

    store: FileStore
    file_names: tuple[str, ...]
    config: dict[str, Any] | None
    config_digest: str | None
    tensors: Mapping[str, TensorEntry]
    files: tuple[WeightFile, ...]
    container: Container
    layout: Layout
    diagnostics: tuple[Diagnostic, ...]

    @property
    def root(self) -> Path | None:
        """The directory, None when the files are on a hub."""
        return self.store.root

    @property
    def revision(self) -> str | None:
        """Commit that the files belong to, None when nothing says so."""
        return self.store.revision

    def read_bytes(self, key: str) -> bytes:
        """Return the stored bytes of one tensor.

        Raises:
            KeyError: no tensor of that name.
            DiagnosticError: SD108 when the file ends before the range does, SD135 when the
                system refuses.
        """
        entry = self.tensors[key]
        return self.read_range(entry.file, entry.begin, entry.end, where=entry.describe())

    def read_range(self, file: str, begin: int, end: int, *, where: str | None = None) -> bytes:
        """Return the bytes of [begin, end) of a file.

        Args:
            file: name relative to the checkpoint's root.
            begin: first byte.
            end: byte after the last.
            where: place for diagnostics; the file's name when None.

        Raises:
            DiagnosticError: SD108 when the file ends before the range does, SD135 when the
                system refuses.
        """
        with self.store.open(file) as stored:
            if stored.size >= end:  # compared first: nothing is allocated for a cut range
                data = stored.read_at(begin, end)
                if len(data) == end - begin:
                    return data
                raise cut_short(where or file, begin + len(data), end)
            raise cut_short(where or file, stored.size, end)

    def iter_range(
        self, file: str, begin: int, end: int, chunk_bytes: int = CHUNK_BYTES
    ) -> Iterator[bytes]:
        """Yield the bytes of [begin, end) of a file in pieces, so that memory stays bounded.

        Args:
            file: name relative to the checkpoint's root.
            begin: first byte.
            end: byte after the last.
            chunk_bytes: size of every piece but the last.

        Raises:
            DiagnosticError: SD108 when the file ends before the range does, SD135 when the
                system refuses.
        """
        with self.store.open(file) as stored:
            if stored.size < end:
                raise cut_short(file, stored.size, end)
            yield from _pieces(stored, file, begin, end, chunk_bytes)

    def read_ints(self, key: str) -> tuple[int, ...]:
        """Return an integer tensor's values, flattened in stored order.

        Raises:
            KeyError: no tensor of that name.
            DiagnosticError: SD133 for another dtype or more than `MAX_ID_LIST_BYTES`, SD108.
        """
        return tuple(self._read_array(key))

    def read_mask(self, key: str) -> bytes:
        """Return a mask tensor's values as bytes of 0 and 1, flattened in stored order.

        Integer dtypes are accepted, as hand-made files use them.

        Raises:
            KeyError: no tensor of that name.
            DiagnosticError: SD133 for another dtype, a value that is neither 0 nor 1 (named by
                its position), or more than `MAX_ID_LIST_BYTES`; SD108.
        """
        values = self._read_array(key)
        if len(values) and not 0 <= min(values) <= max(values) <= 1:
            place, value = next((i, v) for i, v in enumerate(values) if v not in (0, 1))
            raise DiagnosticError(
                diagnose(
                    "SD133",
                    where=self.tensors[key].describe(),
                    message=f"position {place} of the mask holds {value}",
                    expected="0 or 1",
                    found=value,
                )
            )
        return bytes(values)

    def _read_array(self, key: str) -> array[int]:
        entry = self.tensors[key]
        is_typed = entry.dtype in INT_TYPECODES
        if not is_typed or entry.nbytes > MAX_ID_LIST_BYTES:
            raise DiagnosticError(
                diagnose(
                    "SD133",
                    where=entry.describe(),
                    message="the tensor is too large for an id list or a mask"
                    if is_typed
                    else f"dtype {entry.dtype} does not hold integers",
                    expected=f"at most {MAX_ID_LIST_BYTES} bytes"
                    if is_typed
                    else "one of " + " ".join(INT_TYPECODES),
                    found=f"{entry.nbytes} bytes" if is_typed else entry.dtype,
                )
            )
        return unpack_ints(entry.dtype, self.read_bytes(key))

    def json_file(self, name: str) -> dict[str, Any] | None:
        """Return a JSON object file of the directory, None when there is no such file.

        Raises:
            DiagnosticError: the file is there and cannot be read (SD116, SD117, SD134, SD135).
        """
        if not self._is_member(name):
            return None
        findings = Findings()
        table, _ = read_object(self.store, name, findings)
        errors = [d for d in findings.result() if d.severity == "error"]
        if errors:
            raise DiagnosticError(errors)
        return table

    def file_digest(self, name: str) -> str | None:
        """Return `sha256:` of a file's bytes, None when there is no such file.

        Raises:
            DiagnosticError: SD135 when the system refuses to read it.
        """
        if not self._is_member(name):
            return None
        with self.store.open(name) as stored:
            return _digest(stored, name)

    def read_file(self, name: str) -> bytes | None:
        """Return a small file whole, None when there is no such file.

        Raises:
            DiagnosticError: SD135 when the system refuses to read it.
        """
        if not self._is_member(name):
            return None
        with self.store.open(name) as stored:
            return stored.read_at(0, stored.size)

    def _is_member(self, name: str) -> bool:
        if Path(name).name != name:
            raise ValueError(f"{name!r} is not a file name of the directory itself")
        return self.store.has(name)


def _pieces(
    stored: StoredFile, file: str, begin: int, end: int, chunk_bytes: int
) -> Iterator[bytes]:
    while begin < end:
        data = stored.read_at(begin, min(begin + chunk_bytes, end))
        if not data:  # the file was cut after it was opened
            raise cut_short(file, begin, end)
        yield data
        begin += len(data)


def cut_short(where: str, size: int, end: int) -> DiagnosticError:
    """Return SD108: a file of `size` bytes ends before a range that goes to `end`."""
    return DiagnosticError(
        diagnose(
            "SD108",
            where=where,
            message=f"the file ends {end - size} bytes before this tensor does",
            expected=f"{end} bytes",
            found=f"{size} bytes",
        )
    )


def digest_file(path: Path, *, where: str) -> str:
    """Return `sha256:` of a file's bytes.

    Raises:
        DiagnosticError: SD135 when the system refuses to read it.
    """
    with LocalFile(path, where=where) as stored:
        return _digest(stored, where)


def _digest(stored: StoredFile, where: str) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(stored, where, 0, stored.size, CHUNK_BYTES):
        digest.update(piece)
    return "sha256:" + digest.hexdigest()
