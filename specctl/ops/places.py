"""Turn the place of a finding into a file, a line and columns, as editors and CI services show it.

Invariants: nothing here raises for any text or file: a place that cannot be found again has no
line. A pointer to a key that is absent gives the nearest object around it. Lines and columns count
from 1, columns in code points, the end column is one past the last character. Each file is read
once; one that is larger than `MAX_BYTES` (JSON) or `MAX_YAML_BYTES` has no lines.
*Source:* RFC 6901 (JSON pointers).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specctl.ops.json_spans import Path, Span, json_spans, yaml_spans

MAX_BYTES = 16 << 20
MAX_YAML_BYTES = 256 << 10
_YAML = (".yaml", ".yml")
_SEPARATOR = re.compile(r"#|::")
_TENSOR_SHAPE = re.compile(r"\[[^\[\]]*\]$")
_WITHOUT_FILE = ("--", "request=")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a finding is.

    Args:
        file: file or directory as in the finding; None for an option or a request.
        line: None when it is not known.
        column: None when `line` is, or the whole line is meant.
        end_column: on the same line; None with `column`.
        pointer: what follows `#`, None without.
        tensor: name of a tensor, None for other places.
    """

    file: str | None
    line: int | None = None
    column: int | None = None
    end_column: int | None = None
    pointer: str | None = None
    tensor: str | None = None


def find_places(wheres: Iterable[str]) -> dict[str, Place]:
    """Return the place of each `where`; the files are opened once."""
    bare = {where: _split(where) for where in dict.fromkeys(wheres)}
    wanted: dict[str, set[str]] = {}
    for place in bare.values():
        if place.file is not None and place.pointer and place.line is None:
            wanted.setdefault(place.file, set()).add(place.pointer)
    found = {file: _locate(file, pointers) for file, pointers in wanted.items()}
    return {where: _with_line(place, found) for where, place in bare.items()}


def _split(where: str) -> Place:
    """Return the parts of a place; the first separator after an existing path counts."""
    if where.startswith(_WITHOUT_FILE):
        return Place(file=None)
    cuts = [(match.start(), match.end(), match.group()) for match in _SEPARATOR.finditer(where)]
    for begin, end, mark in cuts[:8]:
        if os.path.lexists(where[:begin].replace("\0", "")):
            return _part(where[:begin], mark, where[end:])
    if cuts:
        begin, end, mark = cuts[0]
        return _part(where[:begin], mark, where[end:])
    name, _, line = where.rpartition(":")
    if name and line.isascii() and line.isdigit() and len(line) < 10:
        return Place(file=name, line=max(1, int(line)))
    return Place(file=where or None)


def _part(file: str, mark: str, rest: str) -> Place:
    if mark == "#":
        return Place(file=file or None, pointer=rest)
    return Place(file=file or None, tensor=_TENSOR_SHAPE.sub("", rest))


def _with_line(place: Place, found: Mapping[str, Mapping[str, _Region]]) -> Place:
    if place.file is None or not place.pointer or place.line is not None:
        return place
    region = found[place.file].get(place.pointer)
    if region is None:
        return place
    return Place(
        file=place.file,
        line=region.line,
        column=region.column,
        end_column=region.end_column,
        pointer=place.pointer,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Region:
    line: int
    column: int
    end_column: int


def _locate(file: str, pointers: set[str]) -> dict[str, _Region]:
    text = _read(file)
    if text is None:
        return {}
    paths = {pointer: _path(pointer) for pointer in pointers}
    spans = (yaml_spans if file.endswith(_YAML) else json_spans)(text, paths.values())
    regions: dict[str, _Region] = {}
    for pointer, path in paths.items():
        span = _nearest(spans, path)
        if span is not None:
            regions[pointer] = _region(text, span)
    return regions


def _read(file: str) -> str | None:
    if not file.endswith((".json", *_YAML)):
        return None
    limit = MAX_YAML_BYTES if file.endswith(_YAML) else MAX_BYTES
    try:
        if not os.path.isfile(file) or os.path.getsize(file) > limit:  # noqa: PTH113, PTH202  (any text)
            return None
        with open(file, "rb") as stream:  # noqa: PTH123  (any text)
            raw = stream.read(limit)
    except (OSError, ValueError):
        return None
    return raw.decode("utf-8-sig", "replace")


def _path(pointer: str) -> Path:
    """Return the keys of a pointer; a text without a slash is a key wherever it is."""
    if not pointer.startswith("/"):
        return (None, pointer)
    return tuple(key.replace("~1", "/").replace("~0", "~") for key in pointer[1:].split("/"))


def _nearest(spans: Mapping[Path, Span], path: Path) -> Span | None:
    for length in range(len(path), -1, -1):
        if path[:length] in spans:
            return spans[path[:length]]
    return None


def _region(text: str, span: Span) -> _Region:
    begin, end = span
    line_start = text.rfind("\n", 0, begin) + 1
    line_end = text.find("\n", begin)
    end = min(end, len(text) if line_end < 0 else line_end)
    return _Region(
        line=text.count("\n", 0, begin) + 1,
        column=begin - line_start + 1,
        end_column=max(end, begin + 1) - line_start + 1,
    )
