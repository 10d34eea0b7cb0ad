"""Which modules the entries of an ignore list name, in bounded time for any list.

Foreign conventions: an entry is a name, a prefix, a part of a name, a glob with `*` or `?`
(Model-Optimizer) or a regular expression behind `re:` (compressed-tensors).
Invariants: an expression comes from a downloaded file, so that none is run as it stands: it is cut
at its `.*`, the pieces may repeat nothing but digits, and each is looked for after the one before.
That takes time in proportion to the lengths where a backtracking matcher may take for ever.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_MAX_PARTS = 32
_MAX_NAME_CHARS = 500
_MAX_EXPRESSION_CHARS = 1000
_TOKEN = re.compile(r"\\.|\[\^?\]?[^\]]*\]|\(\?:|.", re.DOTALL)
_DIGITS = frozenset((r"\d", "[0-9]"))


@dataclass(frozen=True, slots=True)
class _Expression:
    first: re.Pattern[str]
    rest: tuple[re.Pattern[str], ...]

    def matches(self, name: str) -> bool:
        found = self.first.match(name)
        for piece in self.rest:
            if found is None:
                return False
            found = piece.search(name, found.end())
        return found is not None


@dataclass(frozen=True, slots=True)
class NameEntries:
    """A list of entries, ready to be asked.

    Args:
        names: entries that are names, prefixes or parts of names.
        max_parts: dotted parts of the longest of them.
        expressions: the other entries.
        cost: characters of the other entries; how long one question takes.
        unknown: regular expressions that are not understood, as written.
    """

    names: frozenset[str]
    max_parts: int
    expressions: tuple[_Expression, ...]
    cost: int
    unknown: tuple[str, ...]

    def has(self, module: str) -> bool:
        """Tell whether an entry names the module or something that it lies in."""
        if self.names and any(run in self.names for run in self._runs(module)):
            return True
        if not self.expressions or len(module) > _MAX_NAME_CHARS:
            return False
        return any(entry.matches(module) for entry in self.expressions)

    def hits(self, modules: Iterable[str]) -> frozenset[str]:
        """Return the entries, of those without wildcards, that name something of the modules."""
        if not self.names:
            return frozenset()
        return frozenset(run for name in modules for run in self._runs(name) if run in self.names)

    def _runs(self, module: str) -> Iterator[str]:
        """Yield every run of dotted parts that an entry could be."""
        parts = module.split(".")
        if len(parts) > _MAX_PARTS:
            return
        for begin, run in enumerate(parts):
            yield run
            for part in parts[begin + 1 : begin + self.max_parts]:
                run = f"{run}.{part}"
                yield run


def name_entries(entries: Iterable[str]) -> NameEntries:
    """Return the entries of one list, ready to be asked."""
    names: list[str] = []
    expressions: list[_Expression] = []
    unknown: list[str] = []
    cost = 0
    for entry in entries:
        if not entry.startswith("re:") and not {"*", "?"} & set(entry):
            names.append(entry)
            continue
        found = _expression(entry[3:]) if entry.startswith("re:") else _glob(entry)
        if found is None:
            unknown.append(entry)
        else:
            expressions.append(found)
            cost += len(entry)
    return NameEntries(
        names=frozenset(names),
        max_parts=max((name.count(".") + 1 for name in names), default=0),
        expressions=tuple(expressions),
        cost=cost,
        unknown=tuple(unknown),
    )


def _glob(entry: str) -> _Expression | None:
    """A glob names what it matches and everything below."""
    text = "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in entry)
    return _expression(text + r"(?:\.|$)")


def _expression(text: str) -> _Expression | None:
    """Return the pieces between the `.*` of an expression, None when it needs a backtracker."""
    if len(text) > _MAX_EXPRESSION_CHARS:
        return None
    tokens = _TOKEN.findall(text)
    pieces = [""]
    depth = 0
    for number, token in enumerate(tokens):
        after = tokens[number + 1] if number + 1 < len(tokens) else ""
        before = tokens[number - 1] if number else ""
        depth += (token in ("(", "(?:")) - (token == ")")
        if token in ("*", "+", "?", "{"):
            if token in ("*", "+") and before == "." and depth == 0:
                continue  # joined to the dot below
            if token != "+" or before not in _DIGITS:
                return None
            pieces[-1] += "{1,9}?"  # as few as will do: what follows a `.*` may need the others
        elif token == "." and after in ("*", "+") and depth == 0:
            pieces[-1] += "." if after == "+" else ""
            pieces.append("")
        elif token == "|" and depth == 0:
            return None
        else:
            pieces[-1] += token
    try:
        compiled = [re.compile(piece) for piece in pieces]
    except (re.error, OverflowError, RecursionError):
        return None
    return _Expression(compiled[0], tuple(compiled[1:]))
