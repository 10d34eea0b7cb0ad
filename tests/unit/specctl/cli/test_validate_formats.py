"""SARIF against its official schema, JUnit as XML for any name, the streams of each format."""

from __future__ import annotations

import json
import os
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.cli import app, junit
from specctl.cli.output import Format
from specctl.cli.sarif import artifact, sarif_log
from specctl.cli.validate_answer import lines_of, places_of
from specctl.contract.codes import CODES
from specctl.contract.diagnostics import Diagnostic
from specctl.ops.report import ValidateReport, ValidateResult, finding
from specctl.ops.validate import validate

ROOT = Path(__file__).parents[4]
CHECKPOINTS = ROOT / "fixtures" / "checkpoints"
WIDTH_MISMATCH = "fixtures/checkpoints/speculators-dspark-width-mismatch"
SARIF_SCHEMA = json.loads(
    (Path(__file__).parent / "schemas" / "sarif-2.1.0-rtm.5.schema.json").read_text("utf-8")
)
HOSTILE = "a\x00b\x1b[31m<&>\"'\ufffe\ud800\r\n\t]]>&#0;"


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)


def report_of(*results: ValidateResult) -> ValidateReport:
    return ValidateReport(
        results=results,
        num_errors=sum(len(result.diagnostics) for result in results),
        num_warnings=0,
        num_infos=0,
        num_ignored=0,
        is_clean=False,
        mismatches=None,
    )


def hostile_report(text: str) -> ValidateReport:
    """Return a report whose every text is `text`, as no reader of ours would let through."""
    found = Diagnostic(
        code="SD102",
        severity="error",
        where=f"{text}/config.json#/{text}",
        message=text,
        expected=text,
        found=text,
        help=text,
        notes=(text,),
    )
    return report_of(
        ValidateResult(
            source=text, kind=None, format=text, target=text, diagnostics=(finding(found),)
        )
    )


def sarif(report: ValidateReport) -> dict[str, Any]:
    log = json.loads(json.dumps(sarif_log(report, places_of(report))))
    jsonschema.Draft4Validator(SARIF_SCHEMA).validate(log)
    assert isinstance(log, dict)
    return log


def test_sarif_of_all_fixtures_follows_the_schema_and_names_every_finding() -> None:
    report = validate(["fixtures"])
    (run,) = sarif(report)["runs"]
    results, rules = run["results"], run["tool"]["driver"]["rules"]
    wanted = [(item.code, item.where) for r in report.results for item in r.diagnostics]
    assert [(r["ruleId"], r["properties"]["place"]) for r in results] == wanted
    assert [rule["id"] for rule in rules] == sorted({code for code, _ in wanted})
    for result in results:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        (location,) = result["locations"]
        where = location["physicalLocation"]["artifactLocation"]
        assert where["uri"]
        assert where["uriBaseId"] == "%SRCROOT%"
        if result["ruleId"] != "SD102":
            assert (ROOT / unquote(where["uri"])).exists(), where
    assert sum("region" in r["locations"][0]["physicalLocation"] for r in results) > 50
    for rule in rules:
        assert CODES[rule["id"]].fix in rule["help"]["text"]
    prints = {r["partialFingerprints"]["specctlFinding/v1"] for r in results}
    assert len(prints) == len({(*pair, r["message"]["text"]) for pair, r in zip(wanted, results)})  # noqa: B905


def test_sarif_points_at_the_key() -> None:
    (result,) = sarif(validate([WIDTH_MISMATCH]))["runs"][0]["results"]
    physical = result["locations"][0]["physicalLocation"]
    assert physical["artifactLocation"]["uri"] == f"{WIDTH_MISMATCH}/config.json"
    region = physical["region"]
    line = Path(WIDTH_MISMATCH, "config.json").read_text().splitlines()[region["startLine"] - 1]
    key = line[region["startColumn"] - 1 : region["endColumn"] - 1]
    assert key == '"proposal_methods"'
    (logical,) = result["locations"][0]["logicalLocations"]
    assert logical["fullyQualifiedName"] == "/speculators_config/proposal_methods"


def test_sarif_names_a_tensor_and_gives_it_no_line() -> None:
    source = "fixtures/checkpoints/speculators-eagle3-map-absolute"
    (result,) = sarif(validate([source]))["runs"][0]["results"]
    (location,) = result["locations"]
    assert location["logicalLocations"] == [
        {
            "name": "d2t",
            "kind": "variable",
            "fullyQualifiedName": f"{source}/model.safetensors::d2t",
        }
    ]
    assert "region" not in location["physicalLocation"]


def test_sarif_of_a_list_of_expectations(tmp_path: Path) -> None:
    listed = tmp_path / "list.yaml"
    listed.write_text("gone: {codes: [SD101]}\n")
    log = sarif(validate([WIDTH_MISMATCH], expect=str(listed)))
    assert [r["ruleId"] for r in log["runs"][0]["results"]] == ["expected-codes"] * 2
    empty = sarif(validate([], expect=None))
    assert empty["runs"][0]["results"] == []


def test_artifact_locations(tmp_path: Path) -> None:
    assert artifact("a b/c#d.json") == {"uri": "a%20b/c%23d.json", "uriBaseId": "%SRCROOT%"}
    assert artifact(str(ROOT / "x")) == {"uri": "x", "uriBaseId": "%SRCROOT%"}
    assert artifact("./a/../b") == {"uri": "b", "uriBaseId": "%SRCROOT%"}
    assert artifact("c:d/e")["uri"] == "c%3Ad/e", "a colon would read as a scheme"
    outside = artifact(f"{tmp_path}/\udcff")
    assert outside == {"uri": f"file://{tmp_path.as_posix()}/%FF"}
    assert artifact("hf:org/name@main/config.json")["uri"] == "hf:org/name@main/config.json"


def test_junit_has_one_case_for_each_source() -> None:
    report = validate(["fixtures/checkpoints"])
    root = ET.fromstring(junit.junit_text(report))
    (suite,) = root
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == [r.source for r in report.results]
    failed = [case for case in cases if case.find("failure") is not None]
    assert suite.get("tests") == root.get("tests") == str(len(cases))
    assert suite.get("failures") == root.get("failures") == str(len(failed))
    for case, result in zip(cases, report.results, strict=True):
        problems = [item for item in result.diagnostics if item.severity != "info"]
        failure = case.find("failure")
        assert (failure is None) is (not problems)
        for item in problems:
            assert failure is not None
            assert f"{item.code} {item.severity}" in (failure.text or "")
        output = case.find("system-out")
        assert (output is None) is (len(problems) == len(result.diagnostics))


@pytest.mark.parametrize("text", [HOSTILE, "", " ", "\x7f\x85\u2028"])
def test_hostile_texts_are_still_documents(text: str) -> None:
    report = hostile_report(text)
    case = ET.fromstring(junit.junit_text(report)).find("testsuite/testcase")
    assert case is not None
    if text == HOSTILE:
        name = case.get("name") or ""
        assert name.startswith("a\\x00b\\x1b[31m<&>\"'\\ufffe\\ud800\r\n\t]]>&#0;")
    assert len(list(lines_of(report, Format.concise))) == 2


@settings(deadline=None, max_examples=200)
@given(st.text(st.characters(), max_size=12) | st.text("\x00\x08\x0b\x0c\x1f<>&\"']\ufffe\ud800"))
def test_junit_is_xml_for_any_text(text: str) -> None:
    document = ET.fromstring(junit.junit_text(hostile_report(text)))
    assert document.find("testsuite/testcase/failure") is not None


def test_a_directory_with_a_hostile_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a\x01b <&>\"'", "new\nline", os.fsdecode(b"raw\xff"), "per%cent,comma:colon"]
    for name in names:
        shutil.copytree(CHECKPOINTS / "container-zeros", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    report = validate(["."])
    assert len(report.results) == len(names)
    sarif(report)
    assert len(ET.fromstring(junit.junit_text(report))[0]) == len(names)
    for format in (Format.concise, Format.github):
        for line in lines_of(report, format):
            assert "\n" not in line
            assert "\x01" not in line


@pytest.mark.parametrize("format", [item.value for item in Format])
def test_each_format_is_alone_on_stdout(format: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["validate", WIDTH_MISMATCH, "--format", format]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert "SD302" in out
    assert app.run(["validate", "fixtures/checkpoints/hf-llama-clean", "--format", format]) == 0


@pytest.mark.parametrize("format", ["json", "sarif"])
def test_a_bad_target_or_list_is_in_the_document(
    format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--target", "--expect"):
        arguments = ["validate", WIDTH_MISMATCH, option, "absent", "--format", format]
        assert app.run(arguments) == 1
        out, err = capsys.readouterr()
        assert err == ""
        document = json.loads(out)
        if format == "json":
            first = document["results"][0]
            assert first["source"] == "absent"
            assert [d["code"] for d in first["diagnostics"]] in (["SD119"], ["SD703"])
            assert document["is_clean"] is False
        else:
            jsonschema.Draft4Validator(SARIF_SCHEMA).validate(document)


def test_wrong_codes_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["validate", WIDTH_MISMATCH, "--ignore", "SD30"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: invalid value for --ignore: there is no code `SD30`")
    assert app.run(["validate", WIDTH_MISMATCH, "--ignore", "anchor-width-mismatch"]) == 0
    assert capsys.readouterr().out.endswith("1 source: clean, 1 ignored\n")
