"""`--strict`, `--error` and `--ignore`: one table, validated names, the same list for everybody."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specctl.contract.codes import CODES
from specctl.contract.diagnostics import diagnose
from specctl.ops.inspect import inspect
from specctl.ops.severity import STRICT, USUAL, WrongCodeError, severity_rules
from specctl.ops.validate import validate

Named = Callable[[str], str]
LOST = diagnose("SD102", where="a#", message="lost")
CODE = diagnose("SD204", where="a#", message="code")


def test_usual_rules_change_nothing() -> None:
    assert USUAL.apply([LOST, CODE]) == (LOST, CODE)
    assert severity_rules().apply([LOST, CODE]) == (LOST, CODE)


def test_codes_by_number_or_name_and_in_lists() -> None:
    rules = severity_rules(error=["remote-code-ignored"], ignore=["sd102, 101", "SD107"])
    assert rules.ignored == {"SD101", "SD102", "SD107"}
    (left,) = rules.apply([LOST, CODE])
    assert (left.code, left.severity, left.message) == ("SD204", "error", "code")


def test_strict_raises_its_table_and_ignore_wins() -> None:
    assert set(STRICT) <= set(CODES)
    for code, severity in STRICT.items():
        found = diagnose(code, where="a#", message="m", severity="info")
        assert severity_rules(is_strict=True).apply([found])[0].severity == severity
        assert severity_rules(is_strict=True, ignore=[code]).apply([found]) == ()


@pytest.mark.parametrize(
    ("error", "ignore", "option", "text"),
    [
        (["SD302x"], [], "--error", "did you mean `SD302 anchor-width-mismatch`"),
        ([], ["SD1"], "--ignore", "there is no code `SD1`"),
        ([], ["SD101,"], "--ignore", "there is no code ``"),
        (["SD101"], ["header-unreadable"], "--ignore", "`SD101` is in `--error` as well"),
    ],
)
def test_wrong_names_are_wrong_usage(
    error: list[str], ignore: list[str], option: str, text: str
) -> None:
    with pytest.raises(WrongCodeError) as caught:
        severity_rules(error=error, ignore=ignore)
    assert caught.value.option == option
    assert text in str(caught.value)


def test_validate_counts_what_is_left(checkpoint: Named) -> None:
    source = checkpoint("speculators-dspark-width-mismatch")
    assert not validate([source]).is_clean
    report = validate([source], rules=severity_rules(ignore=["SD302"]))
    assert (report.is_clean, report.num_ignored, report.num_errors) == (True, 1, 0)
    strict = validate([checkpoint("safeailab-eagle3-clean")], rules=severity_rules(error=["SD301"]))
    assert not strict.is_clean


def test_inspect_follows_the_same_rules(checkpoint: Named) -> None:
    source = checkpoint("speculators-eagle3-auto-map")
    assert "SD204" in {item.code for item in inspect(source).diagnostics}
    left = inspect(source, rules=severity_rules(ignore=["SD204"]))
    assert "SD204" not in {item.code for item in left.diagnostics}
