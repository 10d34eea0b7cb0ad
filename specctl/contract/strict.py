"""Check plain values against a msgspec type, reporting every problem with its place.

msgspec stops at the first problem and does not suggest names; this walk collects all of them, so
that one edit can correct them together. `convert` afterwards builds the value.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.text import printable

T = TypeVar("T")
_INT64 = 1 << 63


def convert(value: object, kind: type[T], *, name: str) -> T:
    """Return `value` as a `kind`.

    Args:
        value: mappings, lists and scalars as a YAML or JSON reader returns them.
        kind: a msgspec Struct.
        name: the file, for the places of diagnostics.

    Raises:
        DiagnosticError: SD705 (unknown key), SD706 (type or range), SD707 (missing key); all found.
    """
    findings = check(value, inspect.type_info(kind), where=f"{name}#")
    if findings:
        raise DiagnosticError(findings)
    return msgspec.convert(value, kind)


def check(value: object, kind: inspect.Type, *, where: str) -> list[Diagnostic]:
    """Return every problem of `value` seen as `kind`; `where` is its place."""
    if isinstance(kind, inspect.StructType):
        return _check_struct(value, kind, where)
    if isinstance(kind, inspect.UnionType):
        return _check_union(value, kind, where)
    if isinstance(kind, inspect.DictType):
        if not isinstance(value, dict):
            return [_wrong(value, kind, where)]
        return _flatten(
            check(key, kind.key_type, where=join_pointer(where, key))
            + check(item, kind.value_type, where=join_pointer(where, key))
            for key, item in value.items()
        )
    if isinstance(kind, (inspect.VarTupleType, inspect.ListType)):
        if not isinstance(value, list):
            return [_wrong(value, kind, where)]
        return _flatten(
            check(item, kind.item_type, where=join_pointer(where, index))
            for index, item in enumerate(value)
        )
    return [] if _is_scalar(value, kind) else [_wrong(value, kind, where)]


def _check_struct(value: object, kind: inspect.StructType, where: str) -> list[Diagnostic]:
    if not isinstance(value, dict):
        return [_wrong(value, kind, where)]
    fields = {field.encode_name: field for field in kind.fields}
    findings: list[Diagnostic] = []
    for key, item in value.items():
        if key in fields:
            findings += check(item, fields[key].type, where=join_pointer(where, key))
        else:
            findings.append(_unknown(printable(key), sorted(fields), where))
    findings += [
        diagnose(
            "SD707",
            where=where,
            message=f"required key `{key}` is missing",
            expected=f"`{key}`: {describe_type(field.type)}",
            found="no such key",
        )
        for key, field in fields.items()
        if field.required and key not in value
    ]
    return findings


def _unknown(key: str, known: list[str], where: str) -> Diagnostic:
    near = get_close_matches(key, known, n=1, cutoff=0.6)
    return diagnose(
        "SD705",
        where=join_pointer(where, key),
        message=f"unknown key `{key}`",
        expected=f"`{near[0]}`" if near else "one of " + ", ".join(f"`{k}`" for k in known),
        found=f"`{key}`",
        help=f"did you mean `{near[0]}`?" if near else None,
    )


def _check_union(value: object, kind: inspect.UnionType, where: str) -> list[Diagnostic]:
    best: list[Diagnostic] | None = None
    for option in kind.types:
        findings = check(value, option, where=where)
        if not findings:
            return []
        # Of the options, the one whose outer shape fits has the precise findings.
        if findings[0].where != where or isinstance(option, inspect.StructType):
            best = findings
    if best is not None and isinstance(value, (dict, list)):
        return best
    return [_wrong(value, kind, where)]


def _is_scalar(value: object, kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.NoneType):
        return value is None
    if isinstance(kind, inspect.BoolType):
        return isinstance(value, bool)
    if isinstance(kind, inspect.StrType):
        return isinstance(value, str) and _is_encodable(value)
    if isinstance(kind, inspect.LiteralType):
        return isinstance(value, str) and value in kind.values
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if isinstance(kind, inspect.IntType):
        is_small = isinstance(value, int) and -_INT64 <= value < _INT64
        return is_small and (kind.ge is None or value >= kind.ge)
    return isinstance(kind, inspect.FloatType) and abs(value) <= sys.float_info.max


def _is_encodable(text: str) -> bool:
    """Tell whether UTF-8 can hold the text; JSON can spell half a surrogate pair."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def describe_type(kind: inspect.Type) -> str:
    """Return the type in words, such as `integer >= 1 or null`."""
    if isinstance(kind, inspect.UnionType):
        return " or ".join(describe_type(option) for option in kind.types)
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(f"`{value}`" for value in kind.values)
    if isinstance(kind, inspect.IntType):
        return "integer" if kind.ge is None else f"integer >= {kind.ge}"
    if isinstance(kind, (inspect.VarTupleType, inspect.ListType)):
        return f"list of {describe_type(kind.item_type)}"
    if isinstance(kind, inspect.DictType):
        return f"mapping of {describe_type(kind.value_type)}"
    if isinstance(kind, inspect.StructType):
        return f"mapping ({kind.cls.__name__})"
    names = {
        inspect.NoneType: "null",
        inspect.BoolType: "true or false",
        inspect.StrType: "text",
        inspect.FloatType: "finite number",
    }
    return names.get(type(kind), "value")


def describe_value(value: Any) -> str:
    """Return the value and its type in words, shortened."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, str):
        return f'"{printable(value if len(value) <= 60 else value[:57] + "...")}" (text)'
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value!r:.60} ({'integer' if isinstance(value, int) else 'number'})"


def _wrong(value: object, kind: inspect.Type, where: str) -> Diagnostic:
    name = where.rsplit("/", 1)[-1] if "/" in where.partition("#")[2] else "the manifest"
    return diagnose(
        "SD706",
        where=where,
        message=f"`{name}` has a value that the schema does not allow",
        expected=describe_type(kind),
        found=describe_value(value),
    )


def join_pointer(where: str, key: object) -> str:
    """Return the place of `key` below `where`, escaped as RFC 6901 asks."""
    return f"{where}/{printable(key).replace('~', '~0').replace('/', '~1')}"


def _flatten(groups: Iterable[list[Diagnostic]]) -> list[Diagnostic]:
    return [finding for group in groups for finding in group]
