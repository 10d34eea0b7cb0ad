"""Diagnostics are one line each, whatever a file's names hold."""

from __future__ import annotations

import msgspec
import pytest

from specctl.contract.diagnostics import DiagnosticError, diagnose, has_errors
from specctl.contract.findings import capped
from specctl.contract.text import printable


def test_severity_and_help_default_to_the_codes() -> None:
    found = diagnose("SD701", where="m#", message="m")
    assert found.severity == "error"
    assert found.help is not None
    assert found.slug == "schema-too-new"
    assert diagnose("SD701", where="m#", message="m", severity="info").severity == "info"
    with pytest.raises(KeyError):
        diagnose("SD000", where="m#", message="m")


def test_names_from_files_cannot_break_a_line() -> None:
    found = diagnose(
        "SD502", where="a\n::error::b", message="key `x\r\ny`", expected="\x1b[2J", found="\ud800"
    )
    for text in (found.where, found.message, found.expected, found.found):
        assert text is not None
        assert text.isprintable()
    assert found.message == "key `x\\r\\ny`"
    msgspec.json.encode(found)
    assert len(str(DiagnosticError(found)).splitlines()) == 1


def test_readable_text_is_left_alone() -> None:
    for text in ("", "plain", "na\u00efve \u4e2d\u6587", "a b"):
        assert printable(text) == text
    assert printable(3) == "3"


def test_errors_hold_at_least_one() -> None:
    with pytest.raises(ValueError, match="at least one"):
        DiagnosticError([])
    warning = diagnose("SD713", where="a", message="b")
    assert not has_errors([warning])
    assert has_errors([warning, diagnose("SD701", where="a", message="b")])


def test_of_each_code_a_hundred_are_kept_and_the_others_counted() -> None:
    many = [diagnose("SD211", where=f"config.json#/{i}", message="x") for i in range(250)]
    one = diagnose("SD101", where="f", message="y")
    kept = capped([*many, one])
    assert kept[:99] == tuple(many[:99])
    assert kept[99].notes == ("150 more of SD211 are not listed",)
    assert kept[100:] == (one,)
    assert capped(kept) == kept
