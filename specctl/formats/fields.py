"""Typed reads of config fields: value, origin and diagnostics in one call.

Invariants: a value that is absent, of the wrong type or out of range never becomes a guess: it is
the model class's documented default (origin `derived`, rule named), or None with a diagnostic.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from specctl.contract.file_names import CONFIG
from specctl.contract.findings import Findings
from specctl.contract.manifest import Origin
from specctl.formats.inert import inert_fields

MAX_INTEGER = (1 << 31) - 1
"""Sizes, counts and ids are 32-bit numbers in every engine; a larger one is no size of a model."""
NO_DEFAULTS: Mapping[str, object] = MappingProxyType({})


class ReaderFindings(Findings):
    """What one reader finds: diagnostics, origins of facts, and the fields that it asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.origins: dict[str, Origin] = {}
        self._objects: dict[str, Mapping[str, object]] = {}
        self._used: set[str] = set()

    def open_object(self, pointer: str, data: Mapping[str, object]) -> None:
        """Record that a reader looks into the config object at `pointer`."""
        self._objects[pointer] = data

    def use(self, pointer: str) -> None:
        """Record that a reader asked for the config field at `pointer`."""
        self._used.add(pointer)

    def unread_fields(self) -> Mapping[str, object]:
        """Return pointer -> value of the fields that hold a value and that nobody asked for.

        Fields that cannot change a forward pass (`inert_fields`) are left out; so is null.
        """
        return {
            f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}": value
            for pointer, data in self._objects.items()
            for key, value in data.items()
            if value is not None
            and key not in inert_fields(data)
            and f"{pointer}/{key}" not in self._used
        }

    def read(self, path: str | None, where: str) -> None:
        """Record that the fact at manifest path `path` was read at `where`."""
        if path is not None:
            self.origins[path] = Origin(kind="read", where=where)

    def derived(self, path: str | None, where: str, rule: str) -> None:
        """Record that the fact at `path` follows from `where` by `rule`."""
        if path is not None:
            self.origins[path] = Origin(kind="derived", where=where, rule=rule)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """One object of a config.

    Args:
        data: its keys.
        pointer: JSON pointer of the object, empty for the root.
        findings: receives origins and diagnostics.
        defaults: the model class's defaults for absent keys.
        rule: name of these defaults.
    """

    data: Mapping[str, object]
    pointer: str
    findings: ReaderFindings
    defaults: Mapping[str, object] = field(default_factory=dict)
    rule: str = ""

    def __post_init__(self) -> None:
        """Enter the object into the account of what was read."""
        self.findings.open_object(self.pointer, self.data)

    def raw(self, key: str) -> object:
        """Return a field as stored, None when absent; for values that have no one type."""
        self.findings.use(f"{self.pointer}/{key}")
        return self.data.get(key)

    def where(self, key: str) -> str:
        """Return the place of a key, `config.json#/a/b`."""
        return f"{CONFIG}#{self.pointer}/{key}"

    def has(self, key: str) -> bool:
        """Tell whether the file states the key (null counts as absent)."""
        return self.raw(key) is not None

    def integer(
        self,
        key: str,
        path: str | None = None,
        *,
        minimum: int = 1,
        maximum: int = MAX_INTEGER,
        is_required: bool = False,
    ) -> int | None:
        """Return an integer field; SD206 when required and absent, SD207 for a wrong one."""
        value = self._value(key, path, is_required=is_required)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self._invalid(key, path, value, f"an integer of at least {minimum}")
            return None
        if value > maximum:
            self._invalid(key, path, value, f"an integer of at most {maximum}")
            return None
        return value

    def number(self, key: str, path: str | None = None) -> float | None:
        """Return a positive number as float; SD207 for a wrong one."""
        value = self._value(key, path, is_required=False)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 < value <= sys.float_info.max
        ):
            self._invalid(key, path, value, "a finite number above 0")
            return None
        return float(value)

    def flag(self, key: str, path: str | None = None) -> bool | None:
        """Return a boolean field; SD207 for a wrong one."""
        value = self._value(key, path, is_required=False)
        if value is None or isinstance(value, bool):
            return value
        self._invalid(key, path, value, "true or false")
        return None

    def text(self, key: str, path: str | None = None) -> str | None:
        """Return a non-empty string field; SD207 for a wrong one."""
        value = self._value(key, path, is_required=False)
        if value is None or (isinstance(value, str) and value):
            return value
        self._invalid(key, path, value, "a string")
        return None

    def integers(self, key: str, path: str | None = None) -> tuple[int, ...] | None:
        """Return a list of integers; SD207 for a wrong one."""
        value = self._value(key, path, is_required=False)
        if value is None:
            return None
        if isinstance(value, list) and value and all(map(_is_integer, value)):
            return tuple(value)
        self._invalid(key, path, value, f"a list of integers of at most {MAX_INTEGER}")
        return None

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings, empty when absent; SD207 for a wrong one."""
        value = self.raw(key)
        if value is None:
            return ()
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        self._invalid(key, None, value, "a list of strings")
        return ()

    def section(
        self, key: str, *, defaults: Mapping[str, object] = NO_DEFAULTS, rule: str = ""
    ) -> Fields | None:
        """Return a nested object, None when absent; SD207 when it is no object."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self._invalid(key, None, value, "an object")
            return None
        return Fields(
            data=value,
            pointer=f"{self.pointer}/{key}",
            findings=self.findings,
            defaults=defaults,
            rule=rule,
        )

    def with_defaults(self, defaults: Mapping[str, object], rule: str) -> Fields:
        """Return the same object with the defaults of another model class."""
        return Fields(
            data=self.data,
            pointer=self.pointer,
            findings=self.findings,
            defaults=defaults,
            rule=rule,
        )

    def _value(self, key: str, path: str | None, *, is_required: bool) -> object:
        value = self.raw(key)
        if value is not None:
            self.findings.read(path, self.where(key))
            return value
        default = self.defaults.get(key)
        if default is not None:
            self.findings.derived(path, self.where(key), self.rule)
        elif is_required:
            self.findings.add(
                "SD206",
                where=self.where(key),
                message=f"`{key}` is absent and the format has no rule for it",
                expected=f"`{key}`",
                found="nothing",
            )
        return default

    def _invalid(self, key: str, path: str | None, value: object, expected: str) -> None:
        if path is not None:
            self.findings.origins.pop(path, None)
        self.findings.add(
            "SD207",
            where=self.where(key),
            message=f"`{key}` is not {expected}",
            expected=expected,
            found=repr(value)[:80],
        )


def _is_integer(value: object) -> bool:
    return type(value) is int and -MAX_INTEGER <= value <= MAX_INTEGER


def root_fields(config: Mapping[str, object] | None, findings: ReaderFindings) -> Fields:
    """Return the config's root object; SD206 when there is no config."""
    if config is None:
        findings.add(
            "SD206",
            where=CONFIG,
            message="there is no readable config.json, so no dimension is known",
            expected=CONFIG,
            found="nothing",
            help="Copy config.json from where the weights were published",
        )
    return Fields(data=config or {}, pointer="", findings=findings)


def known_product(left: int | None, right: int | None) -> int | None:
    """Return the product of two sizes; None where one is not known."""
    return None if left is None or right is None else left * right


def known_sum(left: int | None, right: int | None) -> int | None:
    """Return the sum of two sizes; None where one is not known."""
    return None if left is None or right is None else left + right
