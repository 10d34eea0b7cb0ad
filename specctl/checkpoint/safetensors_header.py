"""Read and prove a safetensors header without trusting a number in it.

Invariants: nothing is allocated by a declared length before it was compared with the file's size;
every entry's dtype, shape and range are checked, and the ranges together must cover the data
section exactly. No exception leaves `read_header` for any file content.
*Source:* safetensors format: u64 little-endian header length (at most 100,000,000), JSON object,
data section; ranges are relative to the data section, without overlap, hole or rest.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from specctl.checkpoint.header_table import read_table
from specctl.checkpoint.json_text import parse_object
from specctl.checkpoint.sniff import SNIFF_BYTES, report_foreign
from specctl.checkpoint.sources.store import FileStore
from specctl.checkpoint.tensor_entry import DTYPE_BITS, TensorEntry, place, shown
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.digests import MAX_HEADER_BYTES
from specctl.contract.findings import Findings
from specctl.contract.fingerprint import digest_bytes
from specctl.contract.manifest import WeightFile

_MAX_COUNT = 1 << 63
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


def needed_bytes(head: bytes) -> int:
    """Return how many bytes `read_header` will read of a file that begins with `head`."""
    length = int.from_bytes(head[:8], "little")
    return 8 + length if length <= MAX_HEADER_BYTES and head[8:9] == b"{" else SNIFF_BYTES


def read_header(
    store: FileStore, file: str, findings: Findings
) -> tuple[list[TensorEntry], WeightFile | None]:
    """Return the tensors of one safetensors file and its `WeightFile` record.

    Args:
        store: holds the file.
        file: its name, relative to the checkpoint's root.
        findings: receives SD101, SD105 to SD116 and what the store reports (SD135).

    Returns:
        Entries in header order whose own dtype, shape and offsets are sound (a truncated file
        keeps them: the table is right, the data is not there), and None as record when there
        is no header at all.
    """
    try:
        with store.open(file) as stored:
            size = stored.size
            head = stored.read_at(0, SNIFF_BYTES)
            length = _header_length(head, size, file=file, findings=findings)
            if length is None:
                return [], None
            raw = stored.read_at(8, 8 + length)
    except DiagnosticError as error:
        findings.extend(error.diagnostics)
        return [], None
    if len(raw) != length:
        _add_cut(file, length, len(raw), findings)
        return [], None
    record = WeightFile(
        file=file,
        size_bytes=size,
        header_digest=digest_bytes(raw),
    )
    base = 8 + length
    entries = read_table(raw, file=file, base=base)
    if entries is not None:
        _check_cover(entries, file=file, size=size, base=base, findings=findings)
        return entries, record
    table = parse_object(raw, file=file, findings=findings, code="SD101", what="header")
    if table is None:
        return [], record
    return _entries(table, file=file, size=size, base=base, findings=findings), record


def _add_cut(file: str, length: int, present: int, findings: Findings) -> None:
    findings.add(
        "SD101",
        where=file,
        message=f"the header is cut off: {length} bytes declared, {present} present",
        expected=f"{length} bytes of header",
        found=f"{present} bytes",
    )


def _header_length(head: bytes, size: int, *, file: str, findings: Findings) -> int | None:
    """Return the declared header length once it is plausible, else report and return None."""
    if len(head) >= 9:
        length = int.from_bytes(head[:8], "little")
        if 2 <= length <= min(size - 8, MAX_HEADER_BYTES) and head[8:9] == b"{":
            return length
    if report_foreign(head, size, file=file, findings=findings):
        return None
    if len(head) < 8:
        findings.add(
            "SD101",
            where=file,
            message=f"the file has {size} bytes, fewer than the 8 of the header length",
            expected="at least 10 bytes",
            found=f"{size} bytes",
        )
        return None
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER_BYTES:
        findings.add(
            "SD101",
            where=file,
            message=f"the header length {length} is above the format's limit {MAX_HEADER_BYTES}",
            expected=f"at most {MAX_HEADER_BYTES}",
            found=f"{length} in a file of {size} bytes",
        )
    elif length > size - 8:
        _add_cut(file, length, size - 8, findings)
    elif length < 2:
        findings.add(
            "SD101",
            where=file,
            message=f"the header length {length} is too small for a JSON object",
            expected="at least 2",
            found=length,
        )
    else:
        findings.add(
            "SD101",
            where=file,
            message=f"the header begins with byte 0x{head[8]:02x}, not with `{{`",
            expected="`{`",
            found=f"0x{head[8]:02x}",
        )
    return None


def _entries(
    table: dict[str, Any], *, file: str, size: int, base: int, findings: Findings
) -> list[TensorEntry]:
    metadata = table.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    ):
        findings.add(
            "SD101",
            where=f"{file}::__metadata__",
            message="`__metadata__` is not an object of text values",
        )
    entries: list[TensorEntry] = []
    is_complete = True
    for key, value in table.items():
        entry = _entry(key, value, file=file, base=base, findings=findings)
        if entry is None:
            is_complete = False
        else:
            entries.append(entry)
    if is_complete:  # with entries missing, every neighbour would look like a hole
        _check_cover(entries, file=file, size=size, base=base, findings=findings)
    return entries


def _num_elements(shape: object) -> int | None:
    """Return the product of a shape, capped at `_MAX_COUNT`; None when it is not a shape."""
    if type(shape) is not list:
        return None
    count = 1
    for dim in shape:
        if type(dim) is not int or not 0 <= dim < _MAX_COUNT:
            return None
        count *= dim
        if count > _MAX_COUNT:  # a long list of large numbers would grow without end
            count = _MAX_COUNT
    return count


def _range(offsets: object) -> tuple[int, int] | None:
    if type(offsets) is not list or len(offsets) != 2:
        return None
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < _MAX_COUNT:
        return None
    return begin, end


def _entry(
    key: str, value: object, *, file: str, base: int, findings: Findings
) -> TensorEntry | None:
    """Return one checked entry, or None after reporting why it is not one."""
    if not isinstance(value, dict):
        findings.add(
            "SD101",
            where=place(file, key),
            message="the header entry is not an object with dtype, shape and data_offsets",
            found=type(value).__name__,
        )
        return None
    dtype, shape = value.get("dtype"), value.get("shape")
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    count = _num_elements(shape)
    span = _range(value.get("data_offsets"))
    if not isinstance(dtype, str) or bits is None or count is None or span is None:
        _report_entry(key, value, bits, count, span, file=file, findings=findings)
        return None
    if len(value) != 3:
        _report_extra_keys(key, value, file=file, findings=findings)
    begin, end = span
    if count * bits != (end - begin) * 8:
        _report_size(key, value, bits, count, span, file=file, findings=findings)
        return None
    return TensorEntry(
        key=key,
        file=file,
        dtype=dtype,
        shape=tuple(value["shape"]),
        begin=base + begin,
        end=base + end,
    )


def _report_size(
    key: str,
    value: Mapping[str, object],
    bits: int,
    count: int,
    span: tuple[int, int],
    *,
    file: str,
    findings: Findings,
) -> None:
    where = place(file, key, value["shape"], value["dtype"])
    begin, end = span
    if count >= _MAX_COUNT:
        findings.add(
            "SD115",
            where=where,
            message="the shape has 2^63 elements or more, beyond any file",
            expected=f"the elements of {end - begin} bytes",
            found="2^63 elements or more",
        )
        return
    needed = _exact_bytes(count * bits)
    findings.add(
        "SD113",
        where=where,
        message=f"shape and dtype need {needed} bytes, the range has {end - begin}",
        expected=f"{count} elements of {bits} bits = {needed} bytes",
        found=f"{end - begin} bytes in data_offsets [{begin}, {end}]",
    )


def _exact_bytes(num_bits: int) -> str:
    whole, rest = divmod(num_bits, 8)
    return f"{whole} {rest}/8" if rest else str(whole)


def _report_extra_keys(
    key: str, value: Mapping[str, object], *, file: str, findings: Findings
) -> None:
    extra = ", ".join(f"`{shown(k)}`" for k in sorted(set(value) - _ENTRY_KEYS)[:5])
    findings.add(
        "SD101",
        where=place(file, key),
        message=f"the header entry has keys that the format does not define: {extra}",
        expected="dtype, shape and data_offsets only",
        severity="warning",
    )


def _report_entry(
    key: str,
    value: Mapping[str, object],
    bits: int | None,
    count: int | None,
    span: tuple[int, int] | None,
    *,
    file: str,
    findings: Findings,
) -> None:
    where = place(file, key)

    def text(field: str) -> str:
        return shown(reprlib.repr(value[field])) if field in value else "missing"

    if bits is None:
        findings.add(
            "SD114",
            where=where,
            message=f"dtype {text('dtype')} is not one of the format",
            expected="one of " + " ".join(DTYPE_BITS),
            found=text("dtype"),
        )
    if count is None:
        findings.add(
            "SD115",
            where=where,
            message=f"shape {text('shape')} is not a list of integers in [0, 2^63)",
            expected="a list of dimensions",
            found=text("shape"),
        )
    if span is None:
        findings.add(
            "SD112",
            where=where,
            message=f"data_offsets {text('data_offsets')} is not a range",
            expected="[begin, end] with 0 <= begin <= end",
            found=text("data_offsets"),
        )


def _is_covered(entries: list[TensorEntry], *, size: int, base: int) -> bool:
    """Tell whether the entries, as they stand, follow each other from `base` to `size`."""
    cursor = base
    for entry in entries:
        if entry.begin != cursor:
            return False
        cursor = entry.end
    return cursor == size


def _check_cover(
    entries: list[TensorEntry], *, file: str, size: int, base: int, findings: Findings
) -> None:
    """Report holes, overlaps, a missing tail and a rest; ranges are absolute here."""
    if _is_covered(entries, size=size, base=base):
        return
    cursor = base
    last: TensorEntry | None = None
    first_cut: TensorEntry | None = None
    for entry in sorted(entries, key=lambda e: (e.begin, e.end)):
        if entry.begin > cursor:
            findings.add(
                "SD111",
                where=entry.describe(),
                message=f"{entry.begin - cursor} bytes before this tensor belong to no tensor",
                expected=f"begin {cursor - base}",
                found=f"begin {entry.begin - base}",
            )
        elif entry.begin < cursor and last is not None:
            findings.add(
                "SD110",
                where=entry.describe(),
                message=f"shares {min(cursor, entry.end) - entry.begin} bytes with "
                f"`{shown(last.key)}`",
                expected=f"begin {cursor - base}",
                found=f"begin {entry.begin - base}",
            )
        if entry.end > size and first_cut is None:
            first_cut = entry
        if entry.end >= cursor:
            cursor, last = entry.end, entry
    if first_cut is not None:
        findings.add(
            "SD108",
            where=first_cut.describe(),
            message=f"the file ends {cursor - size} bytes early; this is the first tensor cut off",
            expected=f"{cursor} bytes",
            found=f"{size} bytes",
        )
    elif cursor < size:
        findings.add(
            "SD109",
            where=file,
            message=f"{size - cursor} bytes follow the last tensor",
            expected=f"{cursor} bytes",
            found=f"{size} bytes",
        )
