"""Locate tensors in PyTorch `.bin`/`.pt` zip archives without PyTorch and without executing them.

Invariants: only stored (uncompressed) members are accepted, so a tensor is a byte range of the
archive; storages, offsets and strides are checked against the member's size.
*Source:* torch.save since 1.6: zip with `NAME/data.pkl` and one member `NAME/data/KEY` per storage.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from specctl.checkpoint.pickle_machine import (
    MAX_PICKLE_BYTES,
    GlobalName,
    PersistentId,
    PickleMachine,
    PickleRefusedError,
    Placeholder,
    UnknownGlobalError,
)
from specctl.checkpoint.sniff import SNIFF_BYTES, content_name, report_foreign
from specctl.checkpoint.sources.store import FileStore, RangeStream, StoredFile
from specctl.checkpoint.tensor_entry import DTYPE_BITS, TensorEntry, place, shown
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.digests import MAX_HEADER_BYTES
from specctl.contract.findings import Findings
from specctl.contract.fingerprint import digest_bytes
from specctl.contract.manifest import WeightFile

_STORAGES: MappingProxyType[str, str] = MappingProxyType(
    {
        "torch.BoolStorage": "BOOL",
        "torch.ByteStorage": "U8",
        "torch.CharStorage": "I8",
        "torch.ShortStorage": "I16",
        "torch.IntStorage": "I32",
        "torch.LongStorage": "I64",
        "torch.HalfStorage": "F16",
        "torch.BFloat16Storage": "BF16",
        "torch.FloatStorage": "F32",
        "torch.DoubleStorage": "F64",
        "torch.ComplexFloatStorage": "C64",
    }
)
T = TypeVar("T")
_LOCAL_HEADER_BYTES = 30
_BUFFER_BYTES = 1 << 17  # on a hub every buffer is a request
_ZIP_ERRORS = (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, KeyError)


@dataclass(frozen=True, kw_only=True, slots=True)
class PickledTensor:
    """A tensor as a pickle describes it: a view of a storage, counted in elements."""

    storage_key: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _is_counts(values: object) -> bool:
    return isinstance(values, tuple) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def reduce_plain(name: str, arguments: tuple[Any, ...]) -> Any:
    """Stand in for the calls a plain state dict contains; see `PickleMachine`.

    Raises:
        UnknownGlobalError: any other name.
    """
    if name == "collections.OrderedDict":
        return _ordered(arguments)
    if name == "torch._utils._rebuild_parameter" and len(arguments) >= 1:
        return arguments[0]
    if name == "torch._utils._rebuild_tensor_v2" and len(arguments) >= 4:
        return _tensor(*arguments[:4])
    raise UnknownGlobalError(name)


def _ordered(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    pairs = arguments[0] if arguments else []
    is_pairs = isinstance(pairs, list) and all(
        isinstance(p, (list, tuple)) and len(p) == 2 and isinstance(p[0], str) for p in pairs
    )
    if not is_pairs:
        raise PickleRefusedError("an ordered dictionary of something other than named pairs")
    return {p[0]: p[1] for p in pairs}


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> PickledTensor:
    record = storage.value if isinstance(storage, PersistentId) else None
    if not isinstance(record, tuple) or len(record) < 5 or record[0] != "storage":
        raise PickleRefusedError("a tensor without a storage record")
    _, kind, key, _, size = record[:5]
    if not isinstance(kind, GlobalName) or kind.name not in _STORAGES:
        raise UnknownGlobalError(
            kind.name if isinstance(kind, GlobalName) else f"storage of a {type(kind).__name__}"
        )
    if not isinstance(key, str) or not _is_counts((size, offset)):
        raise PickleRefusedError("a storage record with wrong fields")
    if not _is_counts(shape) or not _is_counts(stride) or len(shape) != len(stride):
        raise PickleRefusedError("a tensor with a wrong shape or stride")
    return PickledTensor(
        storage_key=key,
        dtype=_STORAGES[kind.name],
        offset=offset,
        shape=shape,
        stride=stride,
    )


def is_contiguous(tensor: PickledTensor) -> bool:
    """Tell whether the tensor's elements are one range of its storage in row-major order."""
    step = 1
    for dim, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if dim == 0:
            return True
        if dim != 1 and stride != step:
            return False
        step *= dim
    return True


class TorchArchive:
    """An open PyTorch zip: its pickle and the place of each storage."""

    def __init__(self, stored: StoredFile) -> None:
        self._file = stored
        self._zip = zipfile.ZipFile(io.BufferedReader(RangeStream(stored), _BUFFER_BYTES))
        names = [n for n in self._zip.namelist() if n.endswith("/data.pkl") or n == "data.pkl"]
        if len(names) != 1:
            self._zip.close()
            raise PickleRefusedError(f"the archive holds {len(names)} `data.pkl`, expected 1")
        self._pickle_name = names[0]
        self._prefix = names[0][: -len("data.pkl")]

    def __enter__(self) -> TorchArchive:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def load(self, *, has_placeholders: bool = False) -> Any:
        """Return the pickled object with `PickledTensor` in place of tensors.

        Args:
            has_placeholders: put a `Placeholder` where an unknown name would end the reading.
        """
        info = self._stored(self._pickle_name)
        if info.file_size > MAX_PICKLE_BYTES:
            raise PickleRefusedError(f"`{info.filename}` has {info.file_size} bytes")
        self._data_start(info)  # the member lies in the file: its size may be allocated
        order_name = self._prefix + "byteorder"
        if order_name in self._zip.NameToInfo:
            order = self._stored(order_name)
            if order.file_size > 16 or self._zip.read(order).strip() != b"little":
                raise PickleRefusedError("the archive is not little-endian")
        machine = PickleMachine(reduce_plain, has_placeholders=has_placeholders)
        return machine.run(self._zip.read(info))

    def expect(self, tensors: Iterable[PickledTensor]) -> None:
        """Get the local headers of the tensors' storages, which `byte_range` reads one by one.

        Raises:
            DiagnosticError: SD149 when they are on a hub and too many.
        """
        names = {f"{self._prefix}data/{tensor.storage_key}" for tensor in tensors}
        infos = (self._zip.NameToInfo.get(name) for name in sorted(names))
        places = sorted(info.header_offset for info in infos if info is not None)
        self._file.expect([(place, place + _LOCAL_HEADER_BYTES) for place in places])

    def _stored(self, name: str) -> zipfile.ZipInfo:
        info = self._zip.NameToInfo.get(name)
        if info is None:
            raise PickleRefusedError(f"the archive lacks `{shown(name)}`")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise PickleRefusedError(f"`{shown(name)}` is compressed")
        if info.flag_bits & 1:
            raise PickleRefusedError(f"`{shown(name)}` is encrypted")
        return info

    def byte_range(self, tensor: PickledTensor) -> tuple[int, int]:
        """Return the tensor's absolute byte range in the archive.

        Raises:
            PickleRefusedError: not contiguous, member missing, compressed or too short.
        """
        if not is_contiguous(tensor):
            raise PickleRefusedError(
                f"a view with shape {list(tensor.shape)} and stride {list(tensor.stride)} "
                "is not one byte range"
            )
        info = self._stored(f"{self._prefix}data/{tensor.storage_key}")
        item = DTYPE_BITS[tensor.dtype] // 8
        begin = tensor.offset * item
        end = begin + math.prod(tensor.shape) * item
        if end > info.file_size:
            raise PickleRefusedError(
                f"the tensor ends at byte {end} of a storage of {info.file_size} bytes"
            )
        start = self._data_start(info)
        return start + begin, start + end

    def _data_start(self, info: zipfile.ZipInfo) -> int:
        # The local header repeats name and extra field with lengths of its own (torch pads the
        # extra field to align the data), so the directory's lengths cannot be used.
        begin = info.header_offset
        local = self._file.read_at(begin, begin + _LOCAL_HEADER_BYTES)
        if len(local) != _LOCAL_HEADER_BYTES or local[:4] != b"PK\x03\x04":
            raise PickleRefusedError(f"`{shown(info.filename)}` has no local header")
        name_length = int.from_bytes(local[26:28], "little")
        extra_length = int.from_bytes(local[28:30], "little")
        start = begin + _LOCAL_HEADER_BYTES + name_length + extra_length
        if start + info.file_size > self._file.size:
            raise PickleRefusedError(f"`{shown(info.filename)}` ends after the file does")
        return start

    def directory_digest(self) -> str:
        """Return `sha256:` of the zip's central directory (members' names, sizes, CRCs)."""
        begin, end = self._zip.start_dir, self._file.size
        if not 0 < end - begin <= MAX_HEADER_BYTES:
            raise PickleRefusedError(f"the zip directory has more than {MAX_HEADER_BYTES} bytes")
        return digest_bytes(self._file.read_at(begin, end))


def with_archive(
    store: FileStore,
    file: str,
    findings: Findings,
    use: Callable[[TorchArchive, StoredFile], T],
) -> T | None:
    """Open `file` as an archive and return `use(archive, file)`; report trouble, return None."""
    try:
        with store.open(file) as stored:
            head = stored.read_at(0, SNIFF_BYTES)
            if not head.startswith(b"PK"):
                _report_not_zip(head, stored.size, file, findings)
                return None
            with TorchArchive(stored) as archive:
                return use(archive, stored)
    except DiagnosticError as error:
        findings.extend(error.diagnostics)
    except UnknownGlobalError as error:
        findings.add(
            "SD103",
            where=file,
            message=f"the pickle refers to `{shown(error.name)}`, which is not plain data",
            expected="tensors, parameters, ordered dictionaries, lists and numbers",
            found=shown(error.name),
        )
    except PickleRefusedError as error:
        findings.add("SD132", where=file, message=str(error))
    except OSError as error:
        findings.add("SD135", where=file, message=f"cannot be read: {error.strerror}")
    except _ZIP_ERRORS as error:
        findings.add("SD132", where=file, message=f"the archive is damaged: {shown(str(error))}")
    return None


def _report_not_zip(head: bytes, size: int, file: str, findings: Findings) -> None:
    if content_name(head) == "a Python pickle":
        findings.add(
            "SD131",
            where=file,
            message="a bare pickle without a zip archive (PyTorch before 1.6, or another program)",
            expected="a zip archive with `data.pkl`",
            found="a pickle stream",
        )
    elif not report_foreign(head, size, file=file, findings=findings):
        findings.add(
            "SD132",
            where=file,
            message=f"not a zip archive ({size} bytes)",
            expected="bytes `PK`",
            found=repr(head[:4]),
        )


def read_torch_tensors(
    store: FileStore, file: str, findings: Findings, *, allow_pickle: bool = False
) -> tuple[list[TensorEntry], WeightFile | None]:
    """Return the tensors of a PyTorch zip that holds a flat state dict; see `read_header`.

    Args:
        store: holds the file.
        file: its name.
        findings: receives SD103, SD105 to SD107, SD131, SD132, SD150 and what the store reports.
        allow_pickle: pass over objects of unknown classes (SD150) instead of refusing the file
            (SD103); neither executes anything.
    """

    def use(archive: TorchArchive, stored: StoredFile) -> tuple[list[TensorEntry], WeightFile]:
        record = WeightFile(
            file=file,
            size_bytes=stored.size,
            header_digest=archive.directory_digest(),
        )
        table = archive.load(has_placeholders=allow_pickle)
        if not isinstance(table, dict):
            raise PickleRefusedError(f"holds a {type(table).__name__}, not a table of tensors")
        if allow_pickle:
            table = _without_unknown(table, file, findings)
        archive.expect(v for v in table.values() if isinstance(v, PickledTensor))
        entries = [_table_entry(archive, k, v, file, findings) for k, v in table.items()]
        return [e for e in entries if e is not None], record

    result = with_archive(store, file, findings, use)
    return ([], None) if result is None else result


def _without_unknown(table: dict[Any, Any], file: str, findings: Findings) -> dict[Any, Any]:
    unknown = {k: v.name for k, v in table.items() if isinstance(v, (GlobalName, Placeholder))}
    if unknown:
        names = sorted(set(unknown.values()))
        findings.add(
            "SD150",
            where=file,
            message=f"{len(unknown)} entries of unknown classes were passed over",
            expected="tensors only",
            found=", ".join(f"`{shown(name)}`" for name in names[:6]),
        )
    return {key: value for key, value in table.items() if key not in unknown}


def _table_entry(
    archive: TorchArchive, key: object, value: object, file: str, findings: Findings
) -> TensorEntry | None:
    name = key if isinstance(key, str) else f"key of a {type(key).__name__}"
    if not isinstance(key, str) or not isinstance(value, PickledTensor):
        findings.add(
            "SD132",
            where=place(file, name),
            message=f"the table holds a {type(value).__name__} where a tensor should be",
            help="Save the model's own state dict, without optimizer or trainer state",
        )
        return None
    try:
        begin, end = archive.byte_range(value)
    except PickleRefusedError as error:
        where = place(file, name, value.shape, value.dtype)
        findings.add("SD132", where=where, message=str(error))
        return None
    return TensorEntry(
        key=key, file=file, dtype=value.dtype, shape=value.shape, begin=begin, end=end
    )
