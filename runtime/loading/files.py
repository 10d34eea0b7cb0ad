"""Weight files, opened once: a table of what they store, and one tensor at a time.

Invariants: nothing is executed (`.bin` files go through torch's weights-only reader); reading
copies, so that a file changed later does not change a loaded model and every weight starts at an
aligned address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from runtime.config import dtype_name
from runtime.loading.load_format import dummy_weight
from runtime.loading.shards import Shard
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

_TORCH_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}

_FLOATS = ("BF16", "F16", "F32")

# What safetensors and torch raise for files that are damaged, refused or not weights at all.
_READ_ERRORS = (SafetensorError, OSError, RuntimeError, UnpicklingError)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor as a file describes it.

    Args:
        key: name in the file.
        file: where it is.
        shape: as stored.
        dtype: safetensors spelling.
    """

    key: str
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def place(self) -> str:
        """`file::key[shape dtype]`, as diagnostics name it."""
        return f"{self.file.name}::{self.key}[{list(self.shape)} {self.dtype}]"


class WeightFiles:
    """Open weight files of one source; use as a context manager."""

    def __init__(
        self,
        directory: Path,
        names: Iterable[str],
        *,
        device: torch.device,
        is_dummy: bool = False,
    ) -> None:
        """Open every file and read its table of tensors.

        Args:
            directory: the source.
            names: files relative to it.
            device: where tensors are read to.
            is_dummy: floats are made up (`load_format.dummy_weight`) and none is read; ids are.

        Raises:
            DiagnosticError: SD101 or SD132 (not a weight file), SD135 (no access), SD104 (a tensor
                in two files).
        """
        self._stack = ExitStack()
        self._device = device
        self._is_dummy = is_dummy
        self._readers: dict[str, Callable[[Shard | None], torch.Tensor]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        with ExitStack() as guard:
            guard.callback(self._stack.close)
            for name in names:
                self._open(directory / name)
            guard.pop_all()

    def __enter__(self) -> WeightFiles:
        """Return the open files."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close every file."""
        self._stack.close()

    def read(
        self, key: str, dtype: torch.dtype | None = None, shard: Shard | None = None
    ) -> torch.Tensor:
        """Return a fresh copy of a stored tensor, or of a part of it, on the device.

        Args:
            key: a key of `tensors`.
            dtype: converted to; None keeps the stored one.
            shard: the part; no other byte of the tensor is read from a safetensors file.

        Raises:
            DiagnosticError: as on opening; SD817 (NaN or infinity, stored or by the conversion).
        """
        stored = self.tensors[key]
        try:
            value = self._reader(stored)(shard)
        except _READ_ERRORS as error:
            raise DiagnosticError(_unreadable(stored.file, error)) from error
        out = torch.empty(value.shape, dtype=dtype or value.dtype, device=self._device)
        out.copy_(value)
        out = out if shard is None else _padded(out, shard)
        if out.is_floating_point() and not (is_number := out.isfinite()).all():
            num_wrong = is_number.numel() - int(is_number.sum())
            raise DiagnosticError(_not_finite(stored, num_wrong, out))
        return out

    def _reader(self, stored: StoredTensor) -> Callable[[Shard | None], torch.Tensor]:
        if self._is_dummy and stored.dtype in _FLOATS:
            return _tensor_reader(dummy_weight(stored.key, stored.shape))
        return self._readers[stored.key]

    def _open(self, path: Path) -> None:
        try:
            if path.suffix == ".safetensors":
                self._open_safetensors(path)
            else:
                self._open_pickle(path)
        except _READ_ERRORS as error:
            raise DiagnosticError(_unreadable(path, error)) from error

    def _open_safetensors(self, path: Path) -> None:
        file: Any = self._stack.enter_context(
            safe_open(path, framework="pt", device=str(self._device))
        )
        for key in file.keys():  # noqa: SIM118 - the handle is no mapping
            view = file.get_slice(key)
            self._add(path, key, tuple(view.get_shape()), view.get_dtype())
            self._readers[key] = _safetensors_reader(file, key)

    def _open_pickle(self, path: Path) -> None:
        values: dict[str, torch.Tensor] = torch.load(
            path, map_location="cpu", mmap=True, weights_only=True
        )
        for key, value in values.items():
            name = _TORCH_NAMES.get(value.dtype, dtype_name(value.dtype))
            self._add(path, key, tuple(value.shape), name)
            self._readers[key] = _tensor_reader(value)

    def _add(self, path: Path, key: str, shape: tuple[int, ...], dtype: str) -> None:
        if key in self.tensors:
            raise DiagnosticError(
                diagnose(
                    "SD104",
                    where=f"{path.name}::{key}",
                    message=f"`{key}` is stored in two files",
                    expected="one file",
                    found=f"{self.tensors[key].file.name} and {path.name}",
                )
            )
        self.tensors[key] = StoredTensor(key=key, file=path, shape=shape, dtype=dtype)


def _safetensors_reader(file: Any, key: str) -> Callable[[Shard | None], torch.Tensor]:
    def read(shard: Shard | None) -> torch.Tensor:
        if shard is None:
            value: torch.Tensor = file.get_tensor(key)
            return value
        index = slice(shard.start, shard.stop)
        view = file.get_slice(key)
        part: torch.Tensor = view[index] if shard.dim == 0 else view[:, index]
        return part

    return read


def _tensor_reader(value: torch.Tensor) -> Callable[[Shard | None], torch.Tensor]:
    def read(shard: Shard | None) -> torch.Tensor:
        if shard is None:
            return value.detach()
        return value.detach().narrow(shard.dim, shard.start, shard.stop - shard.start)

    return read


def _padded(part: torch.Tensor, shard: Shard) -> torch.Tensor:
    missing = shard.size - part.shape[shard.dim]
    if not missing:
        return part
    shape = list(part.shape)
    shape[shard.dim] = missing
    return torch.cat([part, part.new_zeros(shape)], dim=shard.dim)


def _not_finite(stored: StoredTensor, num_wrong: int, value: torch.Tensor) -> Diagnostic:
    dtype = dtype_name(value.dtype)
    return diagnose(
        "SD817",
        where=stored.place,
        message=f"`{stored.key}` holds values that are NaN or infinite in {dtype}",
        expected="finite numbers",
        found=f"{num_wrong} of {value.numel()} are not",
    )


def _unreadable(path: Path, error: Exception) -> Diagnostic:
    if isinstance(error, OSError):
        code, expected = "SD135", "a readable file"
    elif path.suffix == ".safetensors":
        code, expected = "SD101", "a safetensors file"
    else:
        code, expected = "SD132", "a zip archive of torch tensors and nothing else"
    return diagnose(
        code,
        where=f"{path}#",
        message=f"`{path.name}` cannot be read",
        expected=expected,
        found=str(error).partition("\n")[0] or type(error).__name__,
    )
