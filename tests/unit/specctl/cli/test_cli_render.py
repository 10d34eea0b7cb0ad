"""One diagnostic in each of its printed forms."""

from __future__ import annotations

import io

import pytest

from specctl.cli import output, render
from specctl.cli.wrapping import wrapped
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.ops.places import Place, find_places


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


def github(diagnostic: Diagnostic) -> str:
    return render.github(diagnostic, find_places([diagnostic.where])[diagnostic.where])


def test_github_line_is_escaped() -> None:
    line = github(
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


def test_github_has_no_file_for_a_place_on_a_hub() -> None:
    found = diagnose("SD137", where="hf:org/draft/config.json", message="none", help="none")
    line = github(found)
    assert line.startswith("::error title=SD137 ")
    assert "%0Aat hf:org/draft/config.json%0A" in line


def test_github_line_number() -> None:
    line = github(diagnose("SD704", where="a/m.yaml:47", message="twice", help="none"))
    assert line.startswith("::error file=a/m.yaml,line=47,title=SD704 ")


def test_concise_is_one_line_to_jump_from(diagnostic: Diagnostic) -> None:
    text = "SD710 error manifest-inconsistent: `verify_width` does not fit"
    place = Place(file="m.yaml", line=4, column=3, end_column=9)
    assert render.concise(diagnostic, place) == f"m.yaml:4:3: {text}"
    assert render.concise(diagnostic, Place(file="m.yaml", line=4)) == f"m.yaml:4: {text}"
    assert render.concise(diagnostic, Place(file="m.yaml")) == f"{diagnostic.where}: {text}"


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_lines_fit_the_terminal_and_lose_nothing(diagnostic: Diagnostic, width: int) -> None:
    whole = render.human(diagnostic)
    lines = render.human(diagnostic, width=width).splitlines()
    breakable = [line for line in lines if not line.startswith("  -->")]
    assert max(map(len, breakable)) <= width
    assert " ".join("\n".join(lines).split()) == " ".join(whole.split())
    colored = render.human(diagnostic, width=width, color=True)
    assert colored.replace("\033[31m", "").replace("\033[0m", "").splitlines() == lines


def test_shapes_are_not_broken() -> None:
    assert wrapped("xx d2t [24 I64] yy", 11, rest="  ") == ["xx d2t", "  [24 I64]", "  yy"]


def test_width_is_asked_of_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert output.width(io.StringIO()) is None
    for columns, width in (("10", 40), ("60", 60), ("5000", 200)):
        monkeypatch.setenv("COLUMNS", columns)
        assert output.width(io.StringIO()) == width


def test_no_color_in_a_file_or_when_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert output.has_color(Terminal())
    assert not output.has_color(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not output.has_color(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not output.has_color(Terminal())


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with output.progress("reading", 3) as step:
        step("a")
    assert capsys.readouterr() == ("", "")
