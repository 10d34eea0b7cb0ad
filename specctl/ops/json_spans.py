"""Where keys and elements stand in a JSON or YAML text, for texts of any quality.

Invariants: the JSON scanner reads broken text as far as it makes sense and never raises; a key that
occurs twice is found at its last place, which is the one that readers keep. Time grows with the
text, memory with what is looked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

Path = tuple[str | None, ...]
"""Keys from the root, element numbers as text; (None, key) is that key at any depth."""

Span = tuple[int, int]
"""First character and one past the last."""

_TOKEN = re.compile(r'["{}\[\],:]|[^\s{}\[\],:"]+')
_IN_STRING = re.compile(r'["\\]')
_MAX_DEPTH = 200  # readers refuse less


class _Container:
    """An object or list that is being read; `path` is None where nothing is looked for."""

    __slots__ = ("count", "is_object", "key", "path")

    def __init__(self, path: Path | None, is_object: bool) -> None:
        self.path = path
        self.is_object = is_object
        self.key: str | None = None
        self.count = 0

    def child(self, wanted: frozenset[Path]) -> Path | None:
        """Return the path of the value that begins, None when nothing is looked for below it."""
        if self.path is None:
            return None
        name = self.key if self.is_object else str(self.count)
        path = None if name is None else (*self.path, name)
        return path if path in wanted else None


def json_spans(text: str, paths: Iterable[Path]) -> dict[Path, Span]:
    """Return the spans of the paths and of the objects around them, as far as they are there.

    The span of a member begins at its key and ends with its value when that is a scalar; the span
    of an element or of the root is its first token.
    """
    listed = list(paths)
    wanted = frozenset(path[:length] for path in listed for length in range(len(path) + 1))
    anywhere = {path[1] for path in listed if len(path) == 2 and path[0] is None}
    found: dict[Path, Span] = {}
    stack: list[_Container] = []
    key_begin = key_end = num_deeper = 0
    for begin, end in _tokens(text):
        token = text[begin:end]
        if num_deeper or (token in "{[" and len(stack) >= _MAX_DEPTH):
            num_deeper += (token in "{[") - (token in "}]")
            continue
        if token in "}]":
            if stack:
                stack.pop()
            continue
        if token in ",:":
            if stack and token == ",":
                stack[-1].count += 1
                stack[-1].key = None
            continue
        top = stack[-1] if stack else None
        if top is not None and top.is_object and top.key is None and token not in "{[":
            top.key, key_begin, key_end = _text(token), begin, end
            if top.key in anywhere:
                found[None, top.key] = (begin, end)
            continue
        path = () if top is None else top.child(wanted)
        is_member = top is not None and top.is_object
        if path is not None and (path or path not in found):
            span_end = key_end if token in "{[" else end
            found[path] = (key_begin, span_end) if is_member else (begin, end)
        if token in "{[":
            stack.append(_Container(path, token == "{"))
    return found


def _tokens(text: str) -> Iterator[Span]:
    """Return strings, marks and words; a string that is never closed reaches to the end."""
    end = 0
    while match := _TOKEN.search(text, end):
        begin, end = match.span()
        if text[begin] == '"':
            end = _string_end(text, end)
        yield begin, end


def _string_end(text: str, position: int) -> int:
    """Return the place after the closing quote; one pass, no memory for any number of escapes."""
    while match := _IN_STRING.search(text, position):
        if match.group() == '"':
            return match.end()
        position = match.end() + 1
    return len(text)


def _text(token: str) -> str:
    try:
        value = json.loads(token)
    except ValueError:
        return token.strip('"')
    return value if isinstance(value, str) else token


def yaml_spans(text: str, paths: Iterable[Path]) -> dict[Path, Span]:
    """Return the spans of the keys of a YAML text; none when it cannot be read."""
    import yaml

    try:
        root = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    found: dict[Path, Span] = {}
    for path in paths:
        node: Any = root
        for length, key in enumerate(path):
            node, span = _yaml_child(node, key)
            if span is None:
                break
            found[path[: length + 1]] = span
    return found


def _yaml_child(node: Any, key: str | None) -> tuple[Any, Span | None]:
    value = getattr(node, "value", None)
    if not isinstance(value, list):
        return None, None
    for index, entry in enumerate(value):
        if isinstance(entry, tuple):
            if str(entry[0].value) == key:
                return entry[1], (entry[0].start_mark.index, entry[0].end_mark.index)
        elif str(index) == key:
            return entry, (entry.start_mark.index, entry.start_mark.index + 1)
    return None, None
