"""Typed, ranged reading of one JSON body by the option table; problems are collected, not thrown.

Invariants: nothing is converted or clamped; a value with a problem reads as its default, and the
request is refused at `raise_problems`, so such a value is never used.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from runtime.server.options import MAX_INTEGER, Endpoint, Option, options_for
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

Body: TypeAlias = Mapping[str, object]


def type_name(value: object) -> str:
    """Name a JSON value's type the way JSON does."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}
    return names.get(type(value), "array")


class BodyReader:
    """Reads typed fields of one body by the option table and collects the problems."""

    def __init__(self, body: Body, endpoint: Endpoint) -> None:
        self._body = body
        self._options = options_for(endpoint)
        self._problems: list[Diagnostic] = []
        for name, value in body.items():
            self._check_known(name, value)

    def _check_known(self, name: str, value: object) -> None:
        option = self._options.get(name)
        if option is None:
            near = difflib.get_close_matches(name, self._options, n=1)
            self.problem(
                "SD902",
                name,
                f"`{name}` is not a field of this endpoint",
                expected=f"`{near[0]}`" if near else "a field of docs/reference/server.md",
                found=f"`{name}`",
            )
        elif not option.is_honoured and not any(_same(value, item) for item in option.neutral):
            self.problem(
                "SD905",
                name,
                f"`{name}` is not supported: {option.note[:1].lower()}{option.note[1:-1]}",
                expected="absent",
                found=shown(value),
            )

    def problem(
        self,
        code: str,
        pointer: str,
        message: str,
        *,
        expected: object = None,
        found: object = None,
    ) -> None:
        """Collect one problem at `body#/<pointer>`."""
        self._problems.append(
            diagnose(
                code, where=f"body#/{pointer}", message=message, expected=expected, found=found
            )
        )

    def raise_problems(self) -> None:
        """Raise what was collected, if anything."""
        if self._problems:
            raise DiagnosticError(self._problems)

    def raw(self, name: str) -> object:
        """Return the field as it is, None when absent."""
        return self._body.get(name)

    def wrong_type(self, pointer: str, expected: str, value: object) -> None:
        """Collect SD903 for one value."""
        self.problem(
            "SD903",
            pointer,
            f"`{pointer}` is a {type_name(value)}",
            expected=expected,
            found=shown(value),
        )

    def integer(self, name: str) -> int | None:
        """Read an integer in its option's range; None when absent, null or refused."""
        value, option = self.raw(name), self._options[name]
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            self.wrong_type(name, "an integer", value)
            return None
        return value if self._in_range(option, value) else None

    def number(self, name: str) -> float | None:
        """Read a finite number in its option's range; None when absent, null or refused."""
        value, option = self.raw(name), self._options[name]
        if value is None:
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.wrong_type(name, "a number", value)
            return None
        return float(value) if self._in_range(option, value) else None

    def boolean(self, name: str) -> bool:
        """Read a boolean; its default when absent, null or refused."""
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            self.wrong_type(name, "a boolean", value)
        return value if isinstance(value, bool) else bool(self._options[name].default)

    def string(self, name: str) -> str | None:
        """Read a string; None when absent, null or refused."""
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            self.wrong_type(name, "a string", value)
        return value if isinstance(value, str) else None

    def number_or_default(self, name: str) -> float:
        """Read a number whose option has a default."""
        value, default = self.number(name), self._options[name].default
        assert isinstance(default, (int, float)), f"option {name} has no default"
        return float(default) if value is None else value

    def integer_or_default(self, name: str) -> int:
        """Read an integer whose option has a default."""
        value, default = self.integer(name), self._options[name].default
        assert isinstance(default, (int, float)), f"option {name} has no default"
        return int(default) if value is None else value

    def _in_range(self, option: Option, value: float) -> bool:
        low, high = option.low, _highest(option)
        is_above = low is None or value > low or (value == low and not option.is_low_open)
        # Beyond 2**1024 an integer is no float, and `isfinite` raises.
        is_finite = isinstance(value, int) or math.isfinite(value)
        if is_above and (high is None or value <= high) and is_finite:
            return True
        is_too_large = option.high is None and high is not None and value > high
        self.problem(
            "SD904",
            option.name,
            f"`{option.name}` is outside its range",
            expected=f"at most {high}" if is_too_large else _range_text(option),
            found=value,
        )
        return False


def _same(value: object, neutral: object) -> bool:
    """Compare JSON values with their types: 1 is not true."""
    return type(value) is type(neutral) and value == neutral


def shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."


def _highest(option: Option) -> float | None:
    """Return the greatest value; integers without one end where those of the devices do."""
    return MAX_INTEGER if option.high is None and option.kind == "integer" else option.high


def _range_text(option: Option) -> str:
    low, high = option.low, option.high
    if low is None:
        return f"at most {high}" if high is not None else "a finite number"
    lower = f"above {low}" if option.is_low_open else f"{low}"
    return f"{lower} to {high}" if high is not None else f"at least {low}"
