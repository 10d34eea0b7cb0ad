"""Dispatch, exit statuses, streams: the manners of the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import specctl
from specctl.cli import app, registry
from specctl.cli.registry import BY_NAME, COMMANDS
from specctl.contract.diagnostics import DiagnosticError, diagnose

ROOT = Path(specctl.__file__).parents[1]


@pytest.fixture
def fake_command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Let `specctl doctor` run a function of the test."""

    def install(function: Callable[..., Any]) -> None:
        module = ModuleType("specctl.cli.commands.doctor")
        vars(module)["doctor"] = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.delenv("SPECCTL_DEBUG", raising=False)

    return install


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for command in COMMANDS:
        assert f"\n  {command.name} " in out
        assert command.summary in out
    assert max(map(len, out.splitlines())) <= 100


def test_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--version"]) == 0
    assert capsys.readouterr().out == f"specctl {specctl.__version__}\n"
    text = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{specctl.__version__}"\n' in text


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["inspct", "x"], "`inspect`"),
        (["build-token-maps"], "`build-token-map`"),
        (["--verson"], "`--version`"),
        (["explain", "--jsn"], "`--json`"),
        (["explain", "schema-to-new"], "`SD701 schema-too-new`"),
    ],
)
def test_unknown_names_get_the_nearest_match(
    arguments: list[str], near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert near in err
    assert "--help` lists" in err


def test_explain_finds_codes_by_number_and_name(capsys: pytest.CaptureFixture[str]) -> None:
    pages = []
    for name in ("SD701", "sd701", "701", "schema-too-new"):
        assert app.run(["explain", name]) == 0
        pages.append(capsys.readouterr().out)
    assert len(set(pages)) == 1
    assert pages[0].startswith("SD701 error schema-too-new\n")
    assert app.run(["explain", "SD701", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["slug"] == "schema-too-new"


def test_explain_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns, width in (("40", 40), ("200", 80)):
        monkeypatch.setenv("COLUMNS", columns)
        assert app.run(["explain", "SD302"]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= width


def test_explain_without_a_code_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    from specctl.contract.codes import CODES

    assert app.run(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(CODES)
    assert app.run(["explain", "--json"]) == 0
    assert [c["code"] for c in json.loads(capsys.readouterr().out)] == list(CODES)


def test_diagnostics_of_a_command_exit_1(
    fake_command: Callable[[Callable[..., Any]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def doctor() -> None:
        raise DiagnosticError(diagnose("SD701", where="m.yaml#/a", message="too new"))

    fake_command(doctor)
    assert app.run(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("SD701 error   schema-too-new: too new\n  --> m.yaml#/a\n")
    assert err.endswith("   more: specctl explain SD701\n")


def test_internal_faults_say_so_without_a_traceback(
    fake_command: Callable[[Callable[..., Any]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def doctor() -> None:
        raise KeyError("lost")

    fake_command(doctor)
    assert app.run(["doctor"]) == 2
    err = capsys.readouterr().err
    assert "internal fault: KeyError: 'lost'" in err
    assert "defect of specctl" in err
    assert "Traceback" not in err
    monkeypatch.setenv("SPECCTL_DEBUG", "1")
    with pytest.raises(KeyError):
        app.run(["doctor"])


def test_a_missing_package_is_not_our_fault(
    fake_command: Callable[[Callable[..., Any]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def doctor() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    fake_command(doctor)
    assert app.run(["doctor"]) == 2
    err = capsys.readouterr().err
    assert "package `torch` is not installed" in err
    assert "specctl doctor" in err


def test_interrupt_exits_130(
    fake_command: Callable[[Callable[..., Any]], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def doctor() -> None:
        raise KeyboardInterrupt

    fake_command(doctor)
    assert app.run(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_status_of_a_command_is_kept(fake_command: Callable[[Callable[..., Any]], None]) -> None:
    import typer

    def doctor(status: int) -> None:
        raise typer.Exit(status)

    fake_command(doctor)
    assert [app.run(["doctor", str(status)]) for status in (0, 1, 2)] == [0, 1, 2]


def test_a_missing_command_module_fails_only_when_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ghost = registry.Command(name="ghost", summary="not there", examples=())
    monkeypatch.setitem(BY_NAME, "ghost", ghost)
    monkeypatch.delenv("SPECCTL_DEBUG", raising=False)
    assert app.run(["--help"]) == 0
    assert app.run(["explain", "SD701"]) == 0
    assert app.run(["ghost"]) == 2
    assert "internal fault" in capsys.readouterr().err


def test_help_and_version_import_nothing_heavy() -> None:
    code = (
        "import sys; from specctl.cli.app import run; run(['--help']); run(['--version']);"
        "heavy = {'typer', 'rich', 'yaml', 'msgspec', 'tokenizers', 'torch', 'numpy'};"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_closed_pipe_is_silent() -> None:
    script = f"{sys.executable} -m specctl explain | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("SD101")
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", ["--version", "explain"])  # one line, and a long text
def test_a_full_disk_under_the_answer_is_not_our_fault(arguments: str) -> None:
    script = f"{sys.executable} -m specctl {arguments} > /dev/full"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == "error: the answer cannot be written: No space left on device\n"
    assert done.returncode == 2


def test_closed_streams_leave_the_exit_status() -> None:
    script = f"{sys.executable} -m specctl explain SD101 >&- 2>&-; echo $?"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_wrong_choice_names_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["validate", "somewhere", "--format", "jsn"]) == 2
    (line, *_) = capsys.readouterr().err.splitlines()
    assert line == (
        "error: invalid value for '--format': 'jsn' is not one of 'human', 'concise', 'json', "
        "'jsonl', 'github', 'sarif', 'junit'"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux only")
def test_directories_whose_names_are_no_text(tmp_path: Path) -> None:
    draft = Path(__file__).parents[4] / "fixtures" / "checkpoints" / "eagle-clean"
    start, out = os.fsencode(tmp_path) + b"/in\xff", os.fsencode(tmp_path) + b"/out\xff"
    shutil.copytree(os.fsencode(draft), start)
    command = [sys.executable, "-m", "specctl", "normalize", start, "--json", "-o", out]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"].endswith("out\\udcff")
    record = json.loads((Path(os.fsdecode(out)) / "specctl.json").read_text())
    assert record["sources"]["draft"]["source"] == "in\\udcff"
