"""Discovery, verdicts and the comparison with a list of expected codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import msgspec
import pytest

from specctl.ops.discover import discover, discover_all
from specctl.ops.report import ValidateReport, json_schema
from specctl.ops.validate import validate

ROOT = Path(__file__).parents[4]
LIST = "fixtures/expected.yaml"
Named = Callable[[str], str]
Copied = Callable[[str], Path]


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("at_root")
def test_fixtures_give_exactly_their_codes() -> None:
    report = validate(["fixtures"], expect=LIST)
    assert report.mismatches == ()
    assert report.is_clean
    assert len(report.results) > 140
    assert {result.kind for result in report.results} == {"draft", "target", "manifest", None}


@pytest.mark.usefixtures("at_root")
@pytest.mark.parametrize(
    "check",
    ["check_geometry", "check_vocabulary", "check_draft_tensors", "check_fit",
     "check_target_tensors"],
)  # fmt: skip
def test_removing_one_check_is_noticed(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"specctl.checks.{check}", lambda *facts: ())
    report = validate(["fixtures"], expect=LIST)
    assert not report.is_clean
    assert report.mismatches
    assert all("lacks SD" in m.problem for m in report.mismatches)


@pytest.mark.usefixtures("at_root")
def test_removing_the_digest_check_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for check in ("verify_digests", "verify_places"):
        monkeypatch.setattr(f"specctl.ops.validate.{check}", lambda *facts: ())
    report = validate(["fixtures/manifests"], expect="fixtures/manifests/expected.yaml")
    assert {m.problem for m in report.mismatches or ()} == {"lacks SD702", "lacks SD712"}


def test_verdicts(checkpoint: Named) -> None:
    clean = validate([checkpoint("speculators-eagle3-clean")], target=checkpoint("hf-llama-clean"))
    assert clean.is_clean
    assert clean.results[0].target == checkpoint("hf-llama-clean")
    only_info = validate([checkpoint("safeailab-eagle3-clean")])
    assert (only_info.num_infos, only_info.is_clean) == (2, True), "infos are facts"
    wrong = validate([checkpoint("speculators-eagle3-clean")], target=checkpoint("hf-llama-wide"))
    assert not wrong.is_clean
    assert wrong.num_errors > 0


def test_a_path_that_is_nothing_is_a_finding(tmp_path: Path) -> None:
    for source in (tmp_path / "absent", tmp_path):
        report = validate([str(source)])
        assert [d.code for d in report.results[0].diagnostics] == ["SD119"]
        assert report.results[0].kind is None


def test_discovery_walks_what_is_no_checkpoint(copied: Copied, tmp_path: Path) -> None:
    copied("hf-llama-clean")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.yaml").write_text("title: not a manifest\n")
    (tmp_path / "notes" / "b.yaml").write_text("schema_version: 1\n")
    (tmp_path / "hf-llama-clean" / "inner").mkdir()
    (tmp_path / "hf-llama-clean" / "inner" / "config.json").write_text("{}")
    found = [(Path(item.path).name, item.kind) for item in discover(str(tmp_path))]
    assert found == [("hf-llama-clean", "checkpoint"), ("b.yaml", "manifest")]


def test_a_named_file_is_a_manifest(tmp_path: Path) -> None:
    path = tmp_path / "any.yaml"
    path.write_text("a: 1\n")
    report = validate([str(path)])
    assert report.results[0].kind == "manifest"
    assert {d.code for d in report.results[0].diagnostics} == {"SD705", "SD707"}


def write_list(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_expectations_point_both_ways(copied: Copied, tmp_path: Path) -> None:
    copied("hf-llama-clean")
    copied("container-zeros")
    source = str(tmp_path)
    listed = write_list(
        tmp_path / "list.yaml",
        "hf-llama-clean: {codes: [SD501]}\ngone: {codes: []}\n",
    )
    report = validate([source], expect=listed)
    problems = {Path(m.source).name: m.problem for m in report.mismatches or ()}
    assert problems == {
        "container-zeros": "is not in the list",
        "hf-llama-clean": "lacks SD501",
        "gone": "is listed and was not found",
    }
    exact = write_list(
        tmp_path / "list.yaml",
        "hf-llama-clean: {codes: []}\ncontainer-zeros: {codes: [SD107]}\n",
    )
    codes = {d.code for r in validate([source]).results for d in r.diagnostics}
    assert validate([source], expect=exact).is_clean is (codes == {"SD107"})


def test_lists_in_subdirectories_add_their_entries(copied: Copied, tmp_path: Path) -> None:
    copied("hf-llama-clean")
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "hf-llama-clean").rename(inner / "target")
    write_list(inner / "expected.yaml", "target: {codes: []}\n")
    report = validate([str(tmp_path)], expect=write_list(tmp_path / "expected.yaml", "{}\n"))
    assert report.mismatches == ()


@pytest.mark.parametrize(
    ("text", "code"),
    [("- a\n", "SD703"), ("a: {codes: SD101}\n", "SD706"), ("a: {code: []}\n", "SD705"),
     ("a: {}\n", "SD707"), ("a: {codes: []}\na: {codes: []}\n", "SD704"), (None, "SD703")],
)  # fmt: skip
def test_lists_that_cannot_be_read(tmp_path: Path, text: str | None, code: str) -> None:
    path = tmp_path / "list.yaml"
    if text is not None:
        path.write_text(text)
    (tmp_path / "x").mkdir()
    report = validate([str(tmp_path)], expect=str(path))
    (result,) = report.results
    assert result.source == str(path)
    assert code in {d.code for d in result.diagnostics}
    assert not report.is_clean
    assert report.mismatches is None


@pytest.mark.usefixtures("at_root")
def test_an_empty_source_is_not_the_working_directory() -> None:
    (result,) = validate([""]).results
    assert [item.code for item in result.diagnostics] == ["SD119"]


@pytest.mark.usefixtures("at_root")
def test_report_follows_its_schema() -> None:
    schema = json_schema(ValidateReport)
    jsonschema.Draft202012Validator.check_schema(schema)
    for expect in (None, LIST):
        report = validate(["fixtures"], expect=expect)
        document = msgspec.json.decode(msgspec.json.encode(report))
        jsonschema.validate(document, schema)


@pytest.mark.usefixtures("at_root")
def test_progress_sees_every_source() -> None:
    from contextlib import nullcontext

    steps: list[str] = []
    totals: list[int] = []

    def progress(total: int) -> nullcontext[Callable[[str], None]]:
        totals.append(total)
        return nullcontext(steps.append)

    report = validate(["fixtures/manifests"], progress=progress)
    assert totals == [len(report.results)]
    assert steps == [result.source for result in report.results]


def found_in(*sources: str) -> list[tuple[str, str]]:
    return [(item.path, item.kind) for item in discover_all(sources)]


def test_a_file_of_a_checkpoint_stands_for_its_directory(
    copied: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = copied("hf-llama-sharded")
    (directory / "README.md").write_text("# model\n")
    (directory / "merge.yaml").write_text("a: 1\n")
    (directory / "manifest.yaml").write_text("schema_version: 1\n")
    (directory / "manifest.json").write_text("{}\n")
    (directory / "served.json").write_text('{"schema_version": 1}\n')
    monkeypatch.chdir(tmp_path)
    name = "hf-llama-sharded"
    inside = sorted(p.name for p in directory.iterdir())
    manifests = {"manifest.yaml", "manifest.json", "merge.yaml", "served.json"}
    for file in inside:
        only = (f"{name}/{file}", "manifest") if file in manifests else (name, "checkpoint")
        assert found_in(f"{name}/{file}") == [only], file
    every = found_in(*(f"{name}/{file}" for file in inside), name, f"./{name}/", str(directory))
    wanted = [(f"{name}/{file}", "manifest") for file in sorted(manifests)]
    assert sorted(every) == [(name, "checkpoint"), *wanted], "each once, whatever it is called"
    monkeypatch.chdir(directory)
    assert found_in("config.json") == [(".", "checkpoint")]
    report = validate(["config.json"])
    assert [item.source for item in report.results] == ["."]
    assert report.results[0].kind == "target"


def test_patterns_are_expanded_here(
    copied: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("hf-llama-clean", "hf-llama-tied", "container-zeros"):
        copied(name)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "container-zeros").rename(tmp_path / "deep" / "er" / "container-zeros")
    (tmp_path / "deep" / "m.yaml").write_text("schema_version: 1\n")
    (tmp_path / "deep" / "notes.yaml").write_text("a: 1\n")
    (tmp_path / "deep" / "package.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    two = [("hf-llama-clean", "checkpoint"), ("hf-llama-tied", "checkpoint")]
    deep = [("deep/er/container-zeros", "checkpoint"), ("deep/m.yaml", "manifest")]
    assert found_in("hf-*") == two
    assert found_in("hf-llama-[ct]*") == two
    assert sorted(found_in("**/config.json")) == sorted([*two, deep[0]])
    assert found_in("*/config.json") == two
    assert sorted(found_in("**")) == sorted([*two, *deep])
    assert found_in("deep/*.yaml") == [deep[1]], "other YAML is not a manifest"
    assert found_in("none-*") == [("none-*", "checkpoint")]
    (result,) = validate(["none-*"]).results
    assert [item.code for item in result.diagnostics] == ["SD119"]
    assert "pattern" in result.diagnostics[0].message
    (of_a_hub,) = validate(["hf:org/na*"]).results
    assert [item.code for item in of_a_hub.diagnostics] == ["SD146"]
    (tmp_path / "hf-llama-clean").rename(tmp_path / "odd[1]")
    assert found_in("odd[1]") == [("odd[1]", "checkpoint")], "a name that is there is no pattern"


def test_a_bad_target_is_a_result_and_drafts_are_checked_alone(checkpoint: Named) -> None:
    drafts = [checkpoint("speculators-eagle3-clean"), checkpoint("speculators-dspark-clean")]
    report = validate(drafts, target="absent")
    assert [item.source for item in report.results] == ["absent", *drafts]
    assert [item.target for item in report.results] == [None, None, None]
    assert [d.code for d in report.results[0].diagnostics] == ["SD119"]
    assert not report.is_clean


def test_source_and_target_in_each_others_place_are_told(checkpoint: Named) -> None:
    draft, target = checkpoint("speculators-eagle3-clean"), checkpoint("hf-llama-clean")
    for sources in ([target], [draft], [target, draft]):
        report = validate(sources, target=draft)
        assert [item.source for item in report.results] == [draft, *sources]
        (finding,) = report.results[0].diagnostics
        assert (finding.code, finding.expected) == ("SD201", "target")
        assert (finding.found, report.is_clean) == ("draft, speculators-eagle3", False)
        assert not any(item.diagnostics for item in report.results[1:])
    assert validate([target, draft], target=target).is_clean


@pytest.mark.usefixtures("at_root")
@pytest.mark.parametrize(
    ("token", "is_told"),
    [
        (2, False),  # the special token that the draft was trained with
        (4, True),  # the letter a
        (63, True),
    ],
)
def test_a_mask_token_that_stands_for_text_is_told(
    token: int, is_told: bool, tmp_path: Path
) -> None:
    source = Path("fixtures/checkpoints/speculators-dspark-clean")
    config = json.loads((source / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "mask_token_id": token}))
    weights = (source / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    report = validate([str(tmp_path)], target="fixtures/checkpoints/hf-llama-clean")
    found = {d.code: d.severity for result in report.results for d in result.diagnostics}
    assert found == ({"SD333": "warning"} if is_told else {})
