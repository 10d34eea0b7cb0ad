"""The opened checkpoint: its config, its tensor table and byte-range reads.

Invariants: frozen and complete; holds no tensor data; reads touch only the range of one tensor.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specctl.checkpoint.findings import Findings
from specctl.checkpoint.json_text import read_object
from specctl.checkpoint.tensor_entry import INT_TYPECODES, TensorEntry, unpack_ints
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.manifest import WeightFile

Container = Literal["safetensors", "pickle", "none"]
Layout = Literal["single", "sharded"]

MAX_ID_LIST_BYTES = 64 << 20  # eight million int64 ids; the largest vocabularies have 262,144
_DIGEST_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A directory with a config and weights, as far as it could be read.

    Args:
        root: the directory.
        config: config.json's object, None when absent or unreadable.
        config_digest: `sha256:` of config.json's bytes, None when absent.
        tensors: tensor name -> entry.
        files: the weight files that were read.
        container: how the weights are stored; `none` when there are none.
        layout: one file, or several with an index.
        diagnostics: everything found while opening.
    """

    root: Path
    config: dict[str, Any] | None
    config_digest: str | None
    tensors: Mapping[str, TensorEntry]
    files: tuple[WeightFile, ...]
    container: Container
    layout: Layout
    diagnostics: tuple[Diagnostic, ...]

    def read_bytes(self, key: str) -> bytes:
        """Return the stored bytes of one tensor.

        Raises:
            KeyError: no tensor of that name.
            DiagnosticError: SD108 when the file ends before the range does, SD135 when the
                system refuses.
        """
        entry = self.tensors[key]
        try:
            with (self.root / entry.file).open("rb") as stream:
                size = stream.seek(0, 2)
                if size >= entry.end:  # compared first: nothing is allocated for a cut range
                    stream.seek(entry.begin)
                    data = stream.read(entry.nbytes)
                    if len(data) == entry.nbytes:
                        return data
        except OSError as error:
            raise DiagnosticError(
                diagnose(
                    "SD135", where=entry.describe(), message=f"cannot be read: {error.strerror}"
                )
            ) from error
        raise DiagnosticError(
            diagnose(
                "SD108",
                where=entry.describe(),
                message=f"the file ends {entry.end - size} bytes before this tensor does",
                expected=f"{entry.end} bytes",
                found=f"{size} bytes",
            )
        )

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
        path = self._member(name)
        if not path.exists():
            return None
        findings = Findings()
        table, _ = read_object(path, file=name, findings=findings)
        errors = [d for d in findings.result() if d.severity == "error"]
        if errors:
            raise DiagnosticError(errors)
        return table

    def file_digest(self, name: str) -> str | None:
        """Return `sha256:` of a file's bytes, None when there is no such file.

        Raises:
            DiagnosticError: SD135 when the system refuses to read it.
        """
        path = self._member(name)
        if not path.exists():
            return None
        return digest_file(path, where=name)

    def _member(self, name: str) -> Path:
        if Path(name).name != name:
            raise ValueError(f"{name!r} is not a file name of the directory itself")
        return self.root / name


def digest_file(path: Path, *, where: str) -> str:
    """Return `sha256:` of a file's bytes.

    Raises:
        DiagnosticError: SD135 when the system refuses to read it.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_DIGEST_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise DiagnosticError(
            diagnose("SD135", where=where, message=f"cannot be read: {error.strerror}")
        ) from error
    return "sha256:" + digest.hexdigest()
