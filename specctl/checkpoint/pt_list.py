"""Read a `.pt` file that holds a list of ids: a plain list of ints or a 1-d integer tensor.

*Source:* FR-Spec and SGLang token maps: `torch.save` of a list of int or of an int64 tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specctl.checkpoint.checkpoint import MAX_ID_LIST_BYTES
from specctl.checkpoint.pickle_machine import PickleRefusedError
from specctl.checkpoint.sources.local import LocalStore
from specctl.checkpoint.sources.store import FileStore, StoredFile
from specctl.checkpoint.tensor_entry import place, unpack_ints
from specctl.checkpoint.torch_zip import PickledTensor, TorchArchive, with_archive
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.findings import Findings

_ID_DTYPES = ("I64", "I32", "I16", "U8", "I8")


def read_pt_ints(path: Path | str) -> tuple[int, ...]:
    """Return the integers of a `.pt` file, executing nothing.

    Raises:
        DiagnosticError: SD103, SD105 to SD107, SD131, SD132, SD133 or SD135.
    """
    path = Path(path)
    return read_stored_ints(LocalStore(path.parent), path.name)


def read_stored_ints(store: FileStore, file: str, *, entry: str | None = None) -> tuple[int, ...]:
    """Return the integers of a `.pt` file of a store, executing nothing.

    Args:
        store: where the file is.
        file: its name.
        entry: key of the list when the file holds a dictionary.

    Raises:
        DiagnosticError: as `read_pt_ints`.
    """
    findings = Findings()

    def use(archive: TorchArchive, stored: StoredFile) -> tuple[int, ...] | None:
        value = archive.load()
        if entry is not None and isinstance(value, dict):
            value = value.get(entry)
        if isinstance(value, PickledTensor):
            return _tensor_ints(stored, archive, value, file, findings)
        return _list_ints(value, file, findings)

    values = with_archive(store, file, findings, use)
    if values is None:
        raise DiagnosticError(findings.result())
    return values


def _list_ints(value: Any, file: str, findings: Findings) -> tuple[int, ...] | None:
    if not isinstance(value, (list, tuple)):
        findings.add(
            "SD133",
            where=file,
            message=f"the file holds a {type(value).__name__}, not a list of integers",
            expected="a list of integers or a 1-d integer tensor",
            found=type(value).__name__,
        )
        return None
    for position, item in enumerate(value):
        if type(item) is not int:
            findings.add(
                "SD133",
                where=f"{file}#/{position}",
                message=f"position {position} holds a {type(item).__name__}",
                expected="an integer",
                found=type(item).__name__,
            )
            return None
    return tuple(value)


def _tensor_ints(
    stored: StoredFile, archive: TorchArchive, tensor: PickledTensor, file: str, findings: Findings
) -> tuple[int, ...] | None:
    begin, end = archive.byte_range(tensor)
    is_list = tensor.dtype in _ID_DTYPES and len(tensor.shape) == 1
    if not is_list or end - begin > MAX_ID_LIST_BYTES:
        findings.add(
            "SD133",
            where=place(file, "tensor", tensor.shape, tensor.dtype),
            message="the tensor is not a 1-d list of integers of a vocabulary's size",
            expected="one dimension, I64",
            found=f"{len(tensor.shape)} dimensions, {tensor.dtype}, {end - begin} bytes",
        )
        return None
    data = stored.read_at(begin, end)
    if len(data) != end - begin:
        raise PickleRefusedError(f"the tensor's {end - begin} bytes are cut to {len(data)}")
    return tuple(unpack_ints(tensor.dtype, data))
