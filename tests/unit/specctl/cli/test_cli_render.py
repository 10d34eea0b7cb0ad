"""One diagnostic in each of its printed forms."""

from __future__ import annotations

import pytest

from specctl.cli import output, render
from specctl.contract.diagnostics import Diagnostic, diagnose


@pytest.fixture
def diagnostic() -> Diagnostic:
    return diagnose(
        "SD710",
        where="m.yaml#/geometry/verify_width",
        message="`verify_width` does not fit",
        expected=5,
        found=4,
        help="set it to 5",
        notes=("a wrong width does not crash", "second"),
    )


def test_terminal_form(diagnostic: Diagnostic) -> None:
    assert render.human(diagnostic) == (
        "SD710 error   manifest-inconsistent: `verify_width` does not fit\n"
        "  --> m.yaml#/geometry/verify_width\n"
        "   expected: 5      found: 4\n"
        "   help: set it to 5\n"
        "   note: a wrong width does not crash\n"
        "   note: second\n"
        "   more: specctl explain SD710"
    )


def test_color_touches_the_severity_only(diagnostic: Diagnostic) -> None:
    colored = render.human(diagnostic, color=True)
    assert "\033[31merror  \033[0m" in colored
    assert colored.replace("\033[31m", "").replace("\033[0m", "") == render.human(diagnostic)


def test_long_values_get_a_line_each(diagnostic: Diagnostic) -> None:
    text = render.human(
        diagnose("SD702", where="a#", message="m", expected="x" * 60, found="y" * 60)
    )
    assert f"\n   expected: {'x' * 60}\n      found: {'y' * 60}\n" in text


@pytest.mark.parametrize(
    ("expected", "found", "line"),
    [("a", None, "   expected: a"), (None, "b", "      found: b"), (None, None, "   help: ")],
)
def test_one_value_alone(expected: str | None, found: str | None, line: str) -> None:
    text = render.human(
        diagnose("SD702", where="a#", message="m", expected=expected, found=found)
    ).splitlines()
    assert text[2].startswith(line)


def test_github_line_is_escaped() -> None:
    line = render.github(
        diagnose(
            "SD102",
            where="a,b:c.json#/weight_map",
            message="100% `x`",
            expected="1%2",
            help="none",
            severity="info",
        )
    )
    assert line == (
        "::notice file=a%2Cb%3Ac.json,title=SD102 shard-missing::100%25 `x`"
        "%0Aat a,b:c.json#/weight_map%0Aexpected: 1%252%0Ahelp: none"
    )
    assert "\n" not in line


def test_github_line_number() -> None:
    line = render.github(diagnose("SD704", where="a/m.yaml:47", message="twice", help="none"))
    assert line.startswith("::error file=a/m.yaml,line=47,title=SD704 ")


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress("reading", 3) as step:
        step("a")
    assert capsys.readouterr() == ("", "")
