"""Compare what a model needs with what its files store, before a byte of a weight is read.

Every expected tensor must be there with its shape and a float dtype; every stored tensor must be
expected, known as optional, or a named buffer. All findings are returned together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from runtime.loading.files import StoredTensor
from runtime.loading.target_keys import is_ignored
from specctl.contract.diagnostics import Diagnostic, diagnose

FLOAT_DTYPES = ("BF16", "F16", "F32")
ID_DTYPES = ("I64", "I32")
MASK_DTYPES = ("BOOL", "U8", "I8", "I64")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """One tensor that a model is built from.

    Args:
        role: canonical role.
        key: name in the files; None when the manifest has no tensor for the role.
        shape: from the manifest's facts.
        dtypes: stored dtypes that the loader can convert.
    """

    role: str
    key: str | None
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOAT_DTYPES


def match_tensors(
    wanted: Collection[Wanted],
    stored: Mapping[str, StoredTensor],
    *,
    optional_keys: Collection[str],
    source: str,
) -> list[Diagnostic]:
    """Return SD501 (missing), SD503 (shape), SD508 (dtype) and SD502 (left over).

    Args:
        wanted: what is needed.
        stored: key -> what the files hold.
        optional_keys: stored keys that are known and read elsewhere or not at all.
        source: the directory, for the places.
    """
    found = [problem for item in wanted for problem in _check_wanted(item, stored, source)]
    known = {item.key for item in wanted} | set(optional_keys)
    found.extend(
        diagnose(
            "SD502",
            where=tensor.place,
            message=f"`{key}` is stored but no part of the model uses it",
            expected="only tensors that the manifest's facts call for",
            found=f"{list(tensor.shape)} {tensor.dtype}",
        )
        for key, tensor in stored.items()
        if key not in known and not is_ignored(key)
    )
    return found


def _check_wanted(
    item: Wanted, stored: Mapping[str, StoredTensor], source: str
) -> list[Diagnostic]:
    if item.key is None or item.key not in stored:
        name = item.key or item.role
        return [
            diagnose(
                "SD501",
                where=f"{source}::{name}",
                message=f"`{name}` is not in the files, and the manifest's facts call for it",
                expected=list(item.shape),
                found="no such tensor",
            )
        ]
    tensor = stored[item.key]
    if tensor.shape != item.shape:
        return [
            diagnose(
                "SD503",
                where=tensor.place,
                message=f"`{item.key}` does not have the shape that the manifest's facts give it",
                expected=list(item.shape),
                found=list(tensor.shape),
            )
        ]
    if tensor.dtype not in item.dtypes:
        return [
            diagnose(
                "SD508",
                where=tensor.place,
                message=f"`{item.key}` is stored as {tensor.dtype}",
                expected=", ".join(item.dtypes),
                found=tensor.dtype,
            )
        ]
    return []
