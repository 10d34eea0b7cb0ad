"""Which findings `normalize` repairs: one table, code -> fix.

Invariants: writing the canonical form of what was read repairs every code of the table. A `safe`
fix states what the files already prove. An `unsafe` one follows from a guess, or drops something
that nothing reads; when it is not asked for, the fields that it would change stay as they were,
absent ones absent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from specctl.contract.diagnostics import Diagnostic
from specctl.formats.aux_layers import AUX_KEY
from specctl.formats.registry import BY_NAME

Safety = Literal["safe", "unsafe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """What is done about a finding.

    Args:
        name: short, for reports and the provenance.
        safety: `safe`, or `unsafe`: only under `--unsafe-fixes`.
        text: what it does, one sentence without full stop.
        fields: pointers of the config that keep their values while an unsafe fix is not applied.
    """

    name: str
    safety: Safety
    text: str
    fields: tuple[str, ...] = ()


_AUX_LISTS = (f"/eagle_config/{AUX_KEY}", f"/{AUX_KEY}")


def _safe(name: str, text: str) -> Fix:
    return Fix(name=name, safety="safe", text=text)


def _unsafe(name: str, text: str, *fields: str) -> Fix:
    return Fix(name=name, safety="unsafe", text=text, fields=fields)


FIXES: Mapping[str, Fix] = MappingProxyType(
    {
        "SD118": _safe("byte-order-mark", "write config.json without a byte-order mark"),
        "SD123": _safe("file-name", "give the weight file the usual name"),
        "SD124": _safe("stray-files", "leave out weight files that are not part of the checkpoint"),
        "SD129": _safe("index-size", "write the index anew"),
        "SD130": _safe("shard-names", "write the shards with their right count"),
        "SD134": _safe("not-finite", "leave out values that JSON does not have"),
        "SD204": _safe("remote-code", "leave out `auto_map`; nothing here runs code"),
        "SD221": _safe("map-beside", "put the map of the side file into the weights"),
        "SD309": _safe("head-dim", "state the head dimension that the q projection shows"),
        "SD310": _safe("layer-count", "state the number of layers that are stored"),
        "SD408": _safe("map-offsets", "store the map as offsets; only absolute ids fit the file"),
        "SD413": _safe("draft-vocab-size", "state the rows of the head"),
        "SD414": _safe("tie-flag", "say that head and embedding are not tied"),
        "SD507": _safe("unused-tensors", "leave out tensors that are known to have no use"),
        "SD211": _unsafe("unknown-fields", "leave out config fields that nothing reads"),
        "SD303": _unsafe("aux-numbering", "write the layers as the guess reads them", *_AUX_LISTS),
        "SD307": _unsafe("anchor", "state the anchor that the token count implies",
                         "/sample_from_anchor"),
        "SD311": _unsafe("norm-before-residual", "state false, as Speculators reads it",
                         "/norm_before_residual"),
        "SD318": _unsafe("fc-bias", "state that `fc` has no bias, as none is stored", "/bias"),
        "SD405": _unsafe("mask", "build `t2d` from `d2t` again"),
        "SD502": _unsafe("unmapped-tensors", "leave out tensors that no rule names"),
    }
)  # fmt: skip


_OPEN_ERRORS = frozenset({"SD124", "SD303"})
"""As errors these leave open what is meant: which weights, which numbering."""


def _fix_of(item: Diagnostic) -> Fix | None:
    is_open = item.code in _OPEN_ERRORS and item.severity == "error"
    return None if is_open else FIXES.get(item.code)


def safety_of(item: Diagnostic, format: str | None) -> Safety | None:
    """Return how safe the fix of a finding is, None when `normalize` has none for it.

    Args:
        item: the finding.
        format: of the draft; None, or one without a writer, cannot be normalized.
    """
    entry = None if format is None else BY_NAME.get(format)
    fix = _fix_of(item)
    if fix is None or entry is None or entry.role != "draft" or entry.write is None:
        return None
    return fix.safety


def settled(
    diagnostics: Iterable[Diagnostic], *, is_unsafe: bool
) -> tuple[tuple[Diagnostic, ...], tuple[Diagnostic, ...]]:
    """Return the findings that are repaired, and those that stay.

    Args:
        diagnostics: of a source.
        is_unsafe: unsafe fixes are asked for.
    """
    fixed: list[Diagnostic] = []
    kept: list[Diagnostic] = []
    for item in diagnostics:
        fix = _fix_of(item)
        is_fixed = fix is not None and (is_unsafe or fix.safety == "safe")
        (fixed if is_fixed else kept).append(item)
    return tuple(fixed), tuple(kept)


def restore(
    config: Mapping[str, Any], before: Mapping[str, Any], pointers: Iterable[str]
) -> dict[str, Any]:
    """Return `config` with the fields at the pointers as they are in `before`."""
    changed: dict[str, Any] = json.loads(json.dumps(dict(config)))
    for pointer in pointers:
        put(changed, pointer, get(before, pointer))
    return changed


def finite(value: Any) -> Any:
    """Return a JSON value without what JSON does not have: such a field is left out (SD134)."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items() if not _is_infinite(item)}
    if isinstance(value, list):
        return [None if _is_infinite(item) else finite(item) for item in value]
    return value


def _is_infinite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


_ABSENT = object()


def get(config: Mapping[str, Any], pointer: str) -> Any:
    """Return the value at a JSON pointer, a mark of absence without one."""
    value: Any = config
    for key in _keys(pointer):
        if not isinstance(value, Mapping) or key not in value:
            return _ABSENT
        value = value[key]
    return value


def put(config: dict[str, Any], pointer: str, value: Any) -> None:
    """Set the value at a JSON pointer, making objects on the way; absence removes the key."""
    *path, last = _keys(pointer)
    holder: dict[str, Any] = config
    for key in path:
        inner = holder.get(key)
        if not isinstance(inner, dict):
            if value is _ABSENT:
                return
            inner = holder[key] = {}
        holder = inner
    if value is _ABSENT:
        holder.pop(last, None)
    else:
        holder[last] = value


def _keys(pointer: str) -> list[str]:
    return [
        part.replace("~1", "/").replace("~0", "~") for part in pointer.removeprefix("/").split("/")
    ]


def config_changes(
    before: Mapping[str, Any], after: Mapping[str, Any], pointer: str = ""
) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield (pointer, JSON before, JSON after) of the fields that differ, in the order of keys."""
    for key in sorted({*before, *after}):
        place = f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"
        old, new = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from config_changes(old, new, place)
        elif old is _ABSENT or new is _ABSENT or old != new or type(old) is not type(new):
            yield place, _json(old), _json(new)


def _json(value: object) -> str | None:
    return None if value is _ABSENT else json.dumps(value, ensure_ascii=False)
