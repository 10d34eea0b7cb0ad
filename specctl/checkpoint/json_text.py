"""Read JSON text strictly: UTF-8, one object, no duplicate keys; each defect is a diagnostic.

Invariants: no exception leaves `parse_object` for any input bytes; what is still readable is
returned next to its diagnostics (duplicate keys keep the last value, as most readers do).
Two readers: a fast one that returns a value only when nothing at all is wrong with the text, and a
slow one that says what is. A property test holds their values equal.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

from specctl.checkpoint.sources.store import FileStore
from specctl.checkpoint.tensor_entry import shown
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.findings import Findings

MAX_JSON_BYTES = 100_000_000
MAX_JSON_DEPTH = 100
MAX_SLOW_BYTES = 16 << 20
"""Longer texts with a defect get one diagnostic; the slow reader would need forty times as much."""
_MAX_NOTED = 1000
_BOM = b"\xef\xbb\xbf"


class _Hooks:
    """What the decoder reports while it reads: duplicate keys and non-finite numbers."""

    def __init__(self) -> None:
        self.duplicates: list[str] = []
        self.constants: list[str] = []

    def pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen and len(self.duplicates) < _MAX_NOTED:
                    self.duplicates.append(key)
                seen.add(key)
        return result

    def constant(self, word: str) -> float:
        self._note(word)
        return float(word.replace("Infinity", "inf"))

    def real(self, text: str) -> float:
        value = float(text)
        if math.isinf(value):
            self._note(text[:40])
        return value

    def _note(self, word: str) -> None:
        if len(self.constants) < _MAX_NOTED:
            self.constants.append(word)


def num_quotes(raw: bytes) -> int:
    """Return how many quotation marks delimit strings in the JSON text `raw`."""
    if b"\\" not in raw:
        return raw.count(b'"')
    # A backslash stands only in strings; what follows a pair of them is not escaped.
    single = raw.replace(rb"\\", b"")
    return single.count(b'"') - single.count(rb"\"")


def decode_flawless(raw: bytes) -> dict[str, Any] | None:
    """Return the object in `raw` when the slow reader would have nothing to report, else None.

    A decoder keeps one of two equal keys. The one it drops leaves quotation marks that no string of
    the value accounts for, so that counting both proves that there was none.
    """
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    strings = _num_strings(value)
    return value if strings is not None and 2 * strings == num_quotes(raw) else None


def _num_strings(value: dict[str, Any]) -> int | None:
    """Return the number of keys and texts, None below `MAX_JSON_DEPTH`."""
    count = 0
    level: list[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        inner: list[Any] = []
        for item in level:
            values: Any = item
            if isinstance(item, dict):
                count += len(item)
                values = item.values()
            kinds = list(map(type, values))
            count += kinds.count(str)
            if dict in kinds or list in kinds:
                inner.extend(v for v in values if isinstance(v, (dict, list)))
        if not inner:
            return count
        level = inner
    return None


def parse_object(
    raw: bytes, *, file: str, findings: Findings, code: str = "SD117", what: str = "file"
) -> dict[str, Any] | None:
    """Return the JSON object in `raw`, or None when there is none.

    Args:
        raw: the text's bytes.
        file: place for diagnostics, relative to the checkpoint's root.
        findings: receives SD116, SD118, SD134 and `code`.
        code: code of an unreadable text: SD117, or SD101 inside a safetensors header.
        what: `file` or `header`, for messages.
    """
    if raw.startswith(_BOM):
        findings.add(
            "SD118", where=file, message=f"the {what} begins with a UTF-8 byte-order mark; skipped"
        )
        raw = raw[len(_BOM) :]
    value = decode_flawless(raw)
    if value is not None:
        return value
    if len(raw) > MAX_SLOW_BYTES:
        _report_long(raw, file=file, findings=findings, code=code, what=what)
        return None
    return _parse_slowly(raw, file=file, findings=findings, code=code, what=what)


def _report_long(raw: bytes, *, file: str, findings: Findings, code: str, what: str) -> None:
    reason = "a key appears more than once in one object, or objects are nested too deeply"
    try:
        msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        reason = str(error)
    findings.add(code, where=file, message=f"the {what} of {len(raw)} bytes is defective: {reason}")


def _parse_slowly(
    raw: bytes, *, file: str, findings: Findings, code: str, what: str
) -> dict[str, Any] | None:
    hooks = _Hooks()
    reason: str
    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=hooks.pairs,
            parse_constant=hooks.constant,
            parse_float=hooks.real,
        )
    except UnicodeDecodeError as error:
        reason = f"the {what} is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}"
    except json.JSONDecodeError as error:
        reason = f"the {what} is not JSON: {error.msg} at line {error.lineno} column {error.colno}"
    except RecursionError:
        reason = f"the {what} is nested too deeply to be read"
    except ValueError as error:  # an integer with more digits than Python converts
        reason = f"the {what} holds a number that cannot be read: {str(error).split(';')[0]}"
    else:
        return _accept(value, hooks, raw, file=file, findings=findings, code=code, what=what)
    findings.add(code, where=file, message=reason)
    return None


def _accept(
    value: object,
    hooks: _Hooks,
    raw: bytes,
    *,
    file: str,
    findings: Findings,
    code: str,
    what: str,
) -> dict[str, Any] | None:
    for key in hooks.duplicates:
        findings.add(
            "SD116",
            where=f"{file}#{shown(key)}",
            message=f"the key `{shown(key)}` appears more than once in one object",
            expected="one entry",
            found="two or more, the last one was read",
        )
    for word in hooks.constants:
        findings.add(
            "SD134",
            where=file,
            message=f"the {what} holds `{word}`, which is not a JSON number",
            severity="error" if word == "NaN" else None,
        )
    if not isinstance(value, dict):
        kind = type(value).__name__
        findings.add(
            code,
            where=file,
            message=f"the {what} is not a JSON object",
            expected="an object `{...}`",
            found=kind,
        )
        return None
    if code != "SD101" and not _is_shallow(value):
        findings.add(code, where=file, message=f"the {what} is nested too deeply to be read")
        return None
    if b"\\u" in raw and not _is_encodable(value):
        findings.add(
            code,
            where=file,
            message=f"the {what} holds half a surrogate pair (`\\ud800`-`\\udfff`)",
        )
        return None
    return value


def _is_shallow(value: object) -> bool:
    """Tell whether no container is deeper than `MAX_JSON_DEPTH`, so that callers may recurse."""
    level: list[object] = [value]
    for _ in range(MAX_JSON_DEPTH):
        inner: list[object] = []
        for item in level:
            values = item.values() if isinstance(item, dict) else item
            inner.extend(v for v in values if isinstance(v, (dict, list)))  # type: ignore[attr-defined]
        if not inner:
            return True
        level = inner
    return False


def _is_encodable(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def read_object(
    store: FileStore, file: str, findings: Findings
) -> tuple[dict[str, Any] | None, bytes | None]:
    """Return a JSON file's object and its raw bytes; (None, None) when it cannot be read.

    Diagnostics: those of the store (SD135 for a local one), SD117 above `MAX_JSON_BYTES`, and
    those of `parse_object`.
    """
    try:
        with store.open(file) as stored:
            if stored.size > MAX_JSON_BYTES:
                findings.add(
                    "SD117",
                    where=file,
                    message="the file is too large for a JSON file of a checkpoint",
                    expected=f"at most {MAX_JSON_BYTES} bytes",
                    found=f"{stored.size} bytes",
                )
                return None, None
            raw = stored.read_at(0, stored.size)
    except DiagnosticError as error:
        findings.extend(error.diagnostics)
        return None, None
    return parse_object(raw, file=file, findings=findings), raw
