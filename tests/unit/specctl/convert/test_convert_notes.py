"""What `convert` and `normalize` say of values that they do not use or do not keep."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from convert_files import CHECKPOINTS, read_weights

from specctl.checkpoint import write_safetensors
from specctl.contract.vocabulary_map import target_mask
from specctl.ops.convert import Options, convert
from specctl.ops.convert_report import ConvertReport
from specctl.ops.given import Given
from specctl.ops.load import load
from specctl.ops.normalize import normalize
from specctl.ops.report import Finding

EAGLE3 = str(CHECKPOINTS / "speculators-eagle3-clean")
OWNER = str(CHECKPOINTS / "hf-llama-clean")
SPECFORGE = str(CHECKPOINTS / "specforge-eagle3-clean")
TINY = str(CHECKPOINTS / "hf-llama-tiny")
BUNDLED = str(CHECKPOINTS / "hf-qwen35-mtp")
PLAN = Options(is_dry_run=True)


def found(report: ConvertReport, code: str) -> list[Finding]:
    return [item for item in report.diagnostics if item.code == code]


def planned(
    source: str, to: str, *, target: str = OWNER, count: int | None = None
) -> ConvertReport:
    given = Given(num_speculative_tokens=count)
    report = convert(source, to=to, out="out", target=target, given=given, options=PLAN)
    assert report.state == "planned", report.diagnostics
    return report


def with_mask(tmp_path: Path) -> Path:
    """Return ModelOpt's clean draft with a `t2d` that fits its `d2t`."""
    start = tmp_path / "modelopt"
    shutil.copytree(CHECKPOINTS / "modelopt-eagle3-clean", start)
    draft = load(str(start)).draft
    assert draft is not None
    assert draft.draft_to_target is not None
    assert draft.target_vocab_size is not None
    size = draft.target_vocab_size
    mask = ("BOOL", (size,), target_mask(draft.draft_to_target, size))
    weights = {key: (d, tuple(s), b) for key, (d, s, b) in read_weights(start).items()}
    write_safetensors(start / "model.safetensors", {**weights, "t2d": mask})
    return start


def test_a_mask_that_modelopt_does_not_store_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = normalize(str(with_mask(tmp_path)), out=str(out))
    assert report.state == "written"
    (item,) = found(report, "SD601")
    assert item.severity == "info"
    assert item.where.endswith("model.safetensors::t2d[64 BOOL]")
    assert "`t2d`" in item.message
    assert "follows from `d2t`" in item.message
    assert "t2d" not in read_weights(out)
    again = normalize(str(out), out=str(tmp_path / "twice"))
    assert found(again, "SD601") == []


def test_the_same_is_said_by_convert_and_needs_no_leave() -> None:
    report = planned(SPECFORGE, "modelopt", target=TINY)
    assert [i.severity for i in found(report, "SD601") if "`t2d`" in i.message] == ["info"]
    assert report.losses_allowed == ()
    for dialect in ("specforge", "nemo-eagle3"):
        kept = planned(SPECFORGE, dialect, target=TINY)
        assert not any("`t2d`" in item.message for item in kept.diagnostics)


def test_maps_of_a_draft_with_the_targets_vocabulary_are_named_too() -> None:
    report = planned(str(CHECKPOINTS / "speculators-eagle3-identity"), "specforge", target=TINY)
    items = [item for item in found(report, "SD601") if item.found in ("d2t", "t2d")]
    assert [item.severity for item in items] == ["info", "info"]
    assert all("every target id stands for itself" in item.message for item in items)


def test_a_count_that_contradicts_the_file_is_said() -> None:
    draft = load(EAGLE3).draft
    assert draft is not None
    stated = draft.declared_num_speculative_tokens
    assert stated is not None
    (item,) = found(planned(EAGLE3, "speculators", count=stated + 1), "SD713")
    assert item.severity == "warning"
    assert item.where.startswith(f"{EAGLE3}/config.json#/speculators_config/proposal_methods")
    assert (item.expected, item.found) == (str(stated), f"{stated + 1} (given)")
    same = planned(EAGLE3, "speculators", count=stated)
    assert found(same, "SD713") == []
    silent = planned(SPECFORGE, "speculators", target=TINY, count=3)
    assert found(silent, "SD713") == []


@pytest.mark.parametrize("target", [OWNER, None])
def test_layers_that_contradict_the_file_are_said_as_by_manifest(target: str | None) -> None:
    draft = load(EAGLE3).draft
    assert draft is not None
    assert draft.aux_layer_ids is not None
    other = (0, *draft.aux_layer_ids[1:])
    for ids, count in ((other, 1), (draft.aux_layer_ids, 0)):
        given = Given(aux_layer_ids=ids)
        report = convert(EAGLE3, to="speculators", out="out", target=target, given=given,
                         options=PLAN)  # fmt: skip
        items = found(report, "SD713")
        assert len(items) == count
        assert all(str(list(other)) in str(item.found) for item in items)


def test_a_target_beside_a_target_has_no_effect_and_that_is_said() -> None:
    given = Given(num_speculative_tokens=1, target_name="org/name")
    report = convert(BUNDLED, to="speculators", out="out", target=OWNER, given=given, options=PLAN)
    (item,) = found(report, "SD805")
    assert (item.severity, item.where, item.found) == ("warning", "--target", OWNER)
    assert BUNDLED in item.message
    alone = convert(BUNDLED, to="speculators", out="out", given=given, options=PLAN)
    assert alone.state == report.state == "planned"
    assert found(alone, "SD805") == []


def test_a_map_of_another_target_is_one_finding(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text(json.dumps(list(range(40, 90))))
    source = str(CHECKPOINTS / "speculators-eagle3-identity")
    given = Given(token_map=str(path))
    report = convert(source, to="speculators", out="out", given=given, options=PLAN)
    (item,) = report.diagnostics
    assert (report.state, item.code) == ("refused", "SD402")
    assert "26 of 50 entries" in item.message
    assert "64 to 89" in item.message
