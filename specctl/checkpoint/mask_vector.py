"""Read the file that holds a block draft's mask vector, executing nothing.

*Source:* vLLM issue 46104: `torch.save` of the vector itself, or of a dictionary with the keys
`mask_token_id` and `embedding`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from specctl.checkpoint.pickle_machine import PickleRefusedError
from specctl.checkpoint.sources.store import FileStore, StoredFile
from specctl.checkpoint.tensor_entry import INT_TYPECODES, place, shown, unpack_ints
from specctl.checkpoint.torch_zip import PickledTensor, TorchArchive, with_archive
from specctl.contract.findings import Findings

_VECTOR_KEY = "embedding"
_ID_KEY = "mask_token_id"
_DTYPES = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskVector:
    """What a mask vector's file states.

    Args:
        where: `file::key[shape dtype]`.
        size: elements of the vector.
        token_id: target id that it stands for, None when the file names none.
    """

    where: str
    size: int
    token_id: int | None


def read_mask_vector(store: FileStore, file: str, findings: Findings) -> MaskVector | None:
    """Return the vector's size and id, None when the file holds no vector.

    Args:
        store: where the file is.
        file: its name.
        findings: receives SD322 for other contents, and SD103, SD105 to SD107, SD131, SD132 and
            SD135 for a file that is no archive of plain data.
    """

    def use(archive: TorchArchive, stored: StoredFile) -> MaskVector | None:
        value = archive.load()
        vector = value.get(_VECTOR_KEY) if isinstance(value, dict) else value
        if not isinstance(vector, PickledTensor):
            _report_other(value, file, findings)
            return None
        where = place(file, _VECTOR_KEY, vector.shape, vector.dtype)
        size = math.prod(vector.shape)
        is_vector = bool(vector.shape) and size == vector.shape[-1] > 0
        if not is_vector or vector.dtype not in _DTYPES:
            findings.add(
                "SD322",
                where=where,
                message=f"a {vector.dtype} tensor of shape {list(vector.shape)} is no vector of "
                "weights",
                expected="one row of " + ", ".join(_DTYPES),
                found=f"{list(vector.shape)} {vector.dtype}",
            )
            return None
        archive.byte_range(vector)  # refuses a storage that is cut off
        token = value.get(_ID_KEY) if isinstance(value, dict) else None
        return MaskVector(where=where, size=size, token_id=_id(token, archive, stored))

    return with_archive(store, file, findings, use)


def _id(value: Any, archive: TorchArchive, stored: StoredFile) -> int | None:
    if isinstance(value, PickledTensor) and value.dtype in INT_TYPECODES:
        begin, end = archive.byte_range(value)
        if math.prod(value.shape) == 1:
            return int(unpack_ints(value.dtype, stored.read_at(begin, end))[0])
    if value is None or type(value) is int:
        return value
    raise PickleRefusedError(f"`{_ID_KEY}` is no integer")


def _report_other(value: Any, file: str, findings: Findings) -> None:
    kind = type(value).__name__
    if isinstance(value, dict):
        keys = ", ".join(f"`{shown(str(key))}`" for key in list(value)[:5])
        kind = f"dictionary of {keys}" if keys else "empty dictionary"
    findings.add(
        "SD322",
        where=file,
        message=f"the file holds a {kind}, and no tensor `{_VECTOR_KEY}`",
        expected=f"a tensor, or a dictionary of `{_ID_KEY}` and `{_VECTOR_KEY}`",
        found=kind,
    )
