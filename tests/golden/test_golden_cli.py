"""Text and JSON of the commands on fixtures, compared with files in tests/golden/expected.

SPECCTL_UPDATE_GOLDEN=1 writes the files again; read the difference before it is committed.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import jsonschema
import pytest

from specctl.cli import app
from specctl.ops.validate import validate

ROOT = Path(__file__).parents[2]
EXPECTED = Path(__file__).parent / "expected"
SCHEMAS = ROOT / "docs" / "reference" / "schemas"
CHECKPOINTS = "fixtures/checkpoints"

# name -> (exit status, arguments); paths are relative to the repository.
CASES: dict[str, tuple[int, list[str]]] = {
    "inspect-target": (0, ["inspect", f"{CHECKPOINTS}/hf-llama-sharded"]),
    "inspect-eagle3": (
        0,
        ["inspect", f"{CHECKPOINTS}/speculators-eagle3-clean", "--target",
         f"{CHECKPOINTS}/hf-llama-clean"],
    ),
    "inspect-safeailab-open": (0, ["inspect", f"{CHECKPOINTS}/safeailab-eagle3-clean"]),
    "inspect-dspark": (0, ["inspect", f"{CHECKPOINTS}/speculators-dspark-clean"]),
    "inspect-mtp": (0, ["inspect", f"{CHECKPOINTS}/deepseek-mtp-clean"]),
    "inspect-other-target": (
        1,
        ["inspect", f"{CHECKPOINTS}/speculators-eagle3-clean", "--target",
         f"{CHECKPOINTS}/hf-llama-wide"],
    ),
    "inspect-truncated": (1, ["inspect", f"{CHECKPOINTS}/container-truncated"]),
    "validate-several": (
        1,
        ["validate", f"{CHECKPOINTS}/hf-llama-clean", f"{CHECKPOINTS}/container-overlap",
         f"{CHECKPOINTS}/container-shard-missing", "fixtures/manifests/defects"],
    ),
    "validate-github": (
        1,
        ["validate", "--format", "github", f"{CHECKPOINTS}/container-two-shards",
         f"{CHECKPOINTS}/conflict-two-layouts"],
    ),
    "validate-concise": (
        1,
        ["validate", "--format", "concise", f"{CHECKPOINTS}/container-index-size",
         f"{CHECKPOINTS}/speculators-dspark-width-mismatch",
         "fixtures/manifests/defects/unknown-key.yaml"],
    ),
    "validate-junit": (
        1,
        ["validate", "--format", "junit", f"{CHECKPOINTS}/hf-llama-clean",
         f"{CHECKPOINTS}/container-config-broken"],
    ),
    "validate-clean": (
        0,
        ["validate", f"{CHECKPOINTS}/speculators-dspark-clean", "--target",
         f"{CHECKPOINTS}/hf-llama-clean"],
    ),
    "explain": (0, ["explain", "SD302"]),
    "help": (0, ["--help"]),
}  # fmt: skip
DOCUMENTS: dict[str, tuple[int, list[str], str]] = {
    "inspect-eagle3": (
        0,
        ["inspect", "--json", f"{CHECKPOINTS}/speculators-eagle3-clean", "--target",
         f"{CHECKPOINTS}/hf-llama-clean"],
        "inspect",
    ),
    "inspect-broken": (1, ["inspect", "--json", f"{CHECKPOINTS}/container-range-wrong"], "inspect"),
    "validate": (
        1,
        ["validate", "--format", "json", f"{CHECKPOINTS}/container-zeros",
         f"{CHECKPOINTS}/container-empty", "fixtures/manifests/defects/unknown-key.yaml"],
        "validate",
    ),
    "validate-bad-target": (
        1,
        ["validate", "--format", "json", f"{CHECKPOINTS}/hf-llama-clean", "--target", "absent"],
        "validate",
    ),
}  # fmt: skip
LINES: dict[str, tuple[int, list[str], str]] = {
    "validate-lines": (
        1,
        ["validate", "--format", "jsonl", f"{CHECKPOINTS}/container-two-shards",
         f"{CHECKPOINTS}/speculators-dspark-width-mismatch"],
        "validate-line",
    ),
}  # fmt: skip


# Text cases that are shown in a terminal of these widths as well.
WIDTHS = (60, 100)
SIZED = ("inspect-eagle3", "inspect-other-target", "validate-several")


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")


def compare(path: Path, text: str) -> None:
    if os.environ.get("SPECCTL_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8")


@pytest.mark.parametrize("name", CASES)
def test_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, arguments = CASES[name]
    assert app.run(arguments) == status
    out, err = capsys.readouterr()
    assert err == ""
    compare(EXPECTED / f"{name}.txt", out)


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("name", SIZED)
def test_text_in_a_terminal(
    name: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    status, arguments = CASES[name]
    assert app.run(arguments) == status
    out = capsys.readouterr().out
    compare(EXPECTED / f"{name}-{columns}.txt", out)
    for line in out.splitlines():
        # A place or a name without a space is left whole, so that it can be copied.
        is_whole = line.startswith(("  -->", "source ", "target "))
        longest = max(map(len, line.split()))
        assert len(line) <= columns or is_whole or longest > columns - 15, line


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, arguments, schema = DOCUMENTS[name]
    assert app.run(arguments) == status
    out, err = capsys.readouterr()
    assert err == ""
    published = json.loads((SCHEMAS / f"{schema}.schema.json").read_text("utf-8"))
    jsonschema.validate(json.loads(out), published)
    compare(EXPECTED / f"{name}.json", out)


@pytest.mark.parametrize("name", LINES)
def test_json_lines(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, arguments, schema = LINES[name]
    assert app.run(arguments) == status
    out = capsys.readouterr().out
    published = json.loads((SCHEMAS / f"{schema}.schema.json").read_text("utf-8"))
    for line in out.splitlines():
        jsonschema.validate(json.loads(line), published)
    compare(EXPECTED / f"{name}.jsonl", out)


def test_github_lines_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    app.run(["validate", "--format", "github", CHECKPOINTS])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 150
    for line in lines:
        level, _, rest = line.removeprefix("::").partition(" file=")
        assert level in ("error", "warning", "notice")
        file = ROOT / re.split(r",(?:line=\d|title=SD)", rest)[0]
        is_missing_shard = file.suffix == ".safetensors" and "SD102" in line
        assert file.exists() or is_missing_shard, line


def test_every_place_is_a_file_that_a_user_can_open() -> None:
    report = validate(["fixtures"], expect="fixtures/expected.yaml")
    places = {(d.code, d.where) for result in report.results for d in result.diagnostics}
    absent = {
        (code, where)
        for code, where in places
        if not Path(re.split(r"#|::|:(?=\d+$)", where)[0]).exists()
    }
    assert len(places) > 150
    assert {code for code, _ in absent} == {"SD102"}, "a missing shard, and nothing else"


def test_expected_list_as_in_the_ci_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["validate", "--expect", "fixtures/expected.yaml", "fixtures/"]) == 0
    assert capsys.readouterr().out.endswith(" 0 different from the list\n")


def test_no_stray_golden_files() -> None:
    wanted = {f"{name}.txt" for name in CASES} | {f"{name}.json" for name in DOCUMENTS}
    wanted |= {f"{name}-{columns}.txt" for name in SIZED for columns in WIDTHS}
    wanted |= {f"{name}.jsonl" for name in LINES}
    assert {path.name for path in EXPECTED.iterdir()} == wanted
