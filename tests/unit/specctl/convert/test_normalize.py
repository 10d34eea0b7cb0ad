"""`normalize`: idempotent, safe fixes only unless asked, facts that are set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from convert_files import CHECKPOINTS, ROOT, config_of, names_in, read_weights

from specctl.contract.codes import CODES
from specctl.convert.fixes import FIXES, config_changes, get, put
from specctl.convert.settings import SETTINGS
from specctl.ops.convert import Options
from specctl.ops.convert_report import ConvertReport
from specctl.ops.normalize import normalize
from specctl.ops.validate import validate

EXPECTED = yaml.safe_load((ROOT / "fixtures" / "expected.yaml").read_text())
QUICK = Options(has_digests=False)
TARGETS = {name: entry.get("target") for name, entry in EXPECTED.items()}


def run(name: str, out: Path, *settings: str, is_unsafe: bool = False) -> ConvertReport:
    target = TARGETS.get(f"checkpoints/{name}")
    return normalize(
        str(CHECKPOINTS / name),
        out=str(out),
        target=None if target is None else str(ROOT / "fixtures" / target),
        settings=settings,
        is_unsafe=is_unsafe,
        options=QUICK,
    )


def errors(report: ConvertReport) -> list[str]:
    return [item.code for item in report.diagnostics if item.severity == "error"]


def codes(path: Path) -> set[str]:
    (result,) = validate([str(path)]).results
    return {item.code for item in result.diagnostics}


CLEAN = [
    name.rpartition("/")[2]
    for name in EXPECTED
    if (name.startswith("checkpoints/speculators-") and name.endswith("-clean"))
    or name.rpartition("/")[2] in ("safeailab-eagle3-clean", "eagle-clean", "zlab-dflash-clean",
                                   "deepspec-dspark-clean", "deepseek-mtp-clean")
]  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_draft_keeps_its_tensors_and_is_normal_after_one_run(
    tmp_path: Path, name: str
) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    report = run(name, once)
    assert (report.state, errors(report)) == ("written", [])
    assert read_weights(once) == read_weights(CHECKPOINTS / name)
    again = normalize(str(once), out=str(twice), options=QUICK)
    assert again.state == "written"
    assert (again.config_changes, again.renames) == ((), ())
    for file in names_in(once) - {"specctl.json"}:
        assert (once / file).read_bytes() == (twice / file).read_bytes()


@pytest.mark.parametrize(
    ("name", "code", "pointer", "value"),
    [
        ("speculators-eagle3-head-dim-absent", "SD309", "/transformer_layer_config/head_dim", 6),
        ("speculators-eagle3-size-inferred", "SD413", "/draft_vocab_size", 24),
        ("safeailab-eagle3-layers-40", "SD310", "/num_hidden_layers", 1),
        ("speculators-eagle3-auto-map", "SD204", "/auto_map", None),
        ("speculators-eagle3-tied-reduced", "SD414", "/tie_word_embeddings", False),
    ],
)
def test_a_safe_fix(tmp_path: Path, name: str, code: str, pointer: str, value: object) -> None:
    out = tmp_path / "out"
    assert code in codes(CHECKPOINTS / name)
    report = run(name, out)
    assert (report.state, errors(report)) == ("written", [])
    assert FIXES[code].name in report.fixes
    assert pointer in {change.pointer for change in report.config_changes}
    found = get(config_of(out), pointer)
    assert found == value or (value is None and "auto_map" not in config_of(out))
    assert code not in codes(out)
    assert json.loads((out / "specctl.json").read_text())["fixes"] == list(report.fixes)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("speculators-eagle3-norm-unstated", "SD311"),
        ("speculators-eagle3-tensor-unknown", "SD502"),
        ("specforge-eagle3-boundary-ids", "SD303"),
    ],
)
def test_an_unsafe_fix_waits_for_the_option(tmp_path: Path, name: str, code: str) -> None:
    plain, fixed = tmp_path / "plain", tmp_path / "fixed"
    assert code in codes(CHECKPOINTS / name)
    report = run(name, plain)
    assert report.state == "written"
    assert FIXES[code].name not in report.fixes
    assert "SD608" in {item.code for item in report.diagnostics}
    assert code in codes(plain)
    report = run(name, fixed, is_unsafe=True)
    if report.state == "refused":  # the guess cannot be written in this dialect
        assert errors(report) == ["SD602"]
        return
    assert FIXES[code].name in report.fixes
    assert code not in codes(fixed)


def test_unknown_fields_and_tensors_stay_unless_asked(tmp_path: Path) -> None:
    name = "speculators-eagle3-tensor-unknown"
    plain, fixed = tmp_path / "plain", tmp_path / "fixed"
    run(name, plain)
    assert set(read_weights(CHECKPOINTS / name)) <= set(read_weights(plain))
    run(name, fixed, is_unsafe=True)
    dropped = set(read_weights(CHECKPOINTS / name)) - set(read_weights(fixed))
    assert len(dropped) == 1


def test_absolute_ids_become_offsets_and_the_mask_is_rebuilt(tmp_path: Path) -> None:
    report = run("speculators-eagle3-map-absolute", tmp_path / "out")
    assert (report.state, "map-offsets" in report.fixes) == ("written", True)
    assert not {"SD405", "SD408"} & codes(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "setting", "code", "pointer", "value"),
    [
        (
            "speculators-eagle3-gamma-missing",
            "num_speculative_tokens=7",
            "SD301",
            "/speculators_config/proposal_methods",
            7,
        ),
        (
            "speculators-eagle3-norm-unstated",
            "norm_before_residual=true",
            "SD311",
            "/norm_before_residual",
            True,
        ),
        (
            "speculators-eagle3-target-unnamed",
            "target_name=org/target",
            "SD209",
            "/speculators_config/verifier/name_or_path",
            "org/target",
        ),
    ],
)
def test_a_fact_that_is_set(
    tmp_path: Path, name: str, setting: str, code: str, pointer: str, value: object
) -> None:
    out = tmp_path / "out"
    report = run(name, out, setting)
    assert (report.state, errors(report)) == ("written", [])
    found = get(config_of(out), pointer)
    if isinstance(found, list):
        found = found[0]["speculative_tokens"]
    assert found == value
    assert code not in codes(out)


@pytest.mark.parametrize(
    "setting", ["gamma=7", "num_speculative_tokens", "num_speculative_tokens=0",
                "num_speculative_tokens=true", "aux_layer_ids=1,2", "norm_before_residual=yes"],
)  # fmt: skip
def test_a_setting_that_is_none(tmp_path: Path, setting: str) -> None:
    report = run("speculators-eagle3-clean", tmp_path / "out", setting)
    assert errors(report) == ["SD609"]
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize(
    "setting", ["num_speculative_tokens=5", "aux_layer_ids=[1,2,6]", "mask_token_id=3"]
)
def test_a_setting_that_the_dialect_cannot_hold(tmp_path: Path, setting: str) -> None:
    report = run("safeailab-eagle3-clean", tmp_path / "out", setting)
    assert set(errors(report)) <= {"SD606", "SD609"}
    assert report.state == "refused"
    assert names_in(tmp_path) == set()


def test_a_finding_without_a_fix_refuses(tmp_path: Path) -> None:
    report = run("speculators-eagle3-map-duplicate", tmp_path / "out")
    assert errors(report) == ["SD404"]
    assert names_in(tmp_path) == set()


def test_a_dry_run_shows_the_difference(tmp_path: Path) -> None:
    report = normalize(
        str(CHECKPOINTS / "safeailab-eagle3-layers-40"),
        out=str(tmp_path / "out"),
        options=Options(is_dry_run=True),
    )
    assert report.state == "planned"
    assert report.config_changes or report.renames
    assert names_in(tmp_path) == set()


def test_a_target_is_not_normalized(tmp_path: Path) -> None:
    assert errors(run("hf-llama-bundled-mtp", tmp_path / "out")) == ["SD201"]
    assert errors(run("hf-llama-clean", tmp_path / "out")) == ["SD201"]


def test_the_table_of_fixes() -> None:
    assert set(FIXES) <= set(CODES)
    names = [fix.name for fix in FIXES.values()]
    assert len(names) == len(set(names))
    assert all(not fix.fields or fix.safety == "unsafe" for fix in FIXES.values())
    assert {code for setting in SETTINGS.values() for code in setting.settles} <= set(CODES)


def test_changes_of_a_config() -> None:
    old = {"a": 1, "b": {"c": [1], "d/e": None}, "g": True}
    new = {"a": 1, "b": {"c": [2]}, "f": "x", "g": 1}
    assert list(config_changes(old, new)) == [
        ("/b/c", "[1]", "[2]"),
        ("/b/d~1e", "null", None),
        ("/f", None, '"x"'),
        ("/g", "true", "1"),
    ]
    config: dict[str, object] = {}
    put(config, "/x/y", 3)
    assert config == {"x": {"y": 3}}
    assert get(config, "/x/y") == 3


def test_validate_says_what_can_be_fixed() -> None:
    def fixable(name: str) -> dict[str, str | None]:
        (result,) = validate([str(CHECKPOINTS / name)]).results
        return {item.code: item.fixable for item in result.diagnostics}

    assert fixable("speculators-eagle3-head-dim-absent")["SD309"] == "safe"
    assert fixable("speculators-eagle3-norm-unstated")["SD311"] == "unsafe"
    assert fixable("speculators-eagle3-map-duplicate")["SD404"] is None
    assert fixable("container-stray-file")["SD124"] == "safe"
    assert fixable("container-index-stale")["SD124"] is None  # which weights are meant is open
    assert set(fixable("hf-llama-tied-copy").values()) == {None}  # a target is not normalized
