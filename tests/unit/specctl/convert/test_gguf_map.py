"""`convert --to gguf-map`: absolute ids, boundaries, and what llama.cpp cannot hold."""

from __future__ import annotations

import json
from pathlib import Path

from convert_files import CHECKPOINTS

from specctl.ops.convert import Options
from specctl.ops.convert_map import write_map
from specctl.ops.convert_report import ConvertReport
from specctl.ops.draft_parts import read_parts
from specctl.ops.given import NOTHING_GIVEN
from specctl.ops.load import load

TARGET = str(CHECKPOINTS / "hf-llama-clean")


def run(name: str, out: Path, *allow: str, is_forced: bool = False) -> ConvertReport:
    parts = read_parts(str(CHECKPOINTS / name), TARGET, NOTHING_GIVEN)
    return write_map(parts, out=str(out), allow=allow, options=Options(is_forced=is_forced))


def errors(report: ConvertReport) -> list[str]:
    return [item.code for item in report.diagnostics if item.severity == "error"]


def test_ids_are_absolute_and_layers_are_boundaries(tmp_path: Path) -> None:
    out = tmp_path / "map.json"
    report = run("safeailab-eagle3-clean", out, "t2d")
    assert (report.state, errors(report)) == ("written", [])
    (loss,) = (item for item in report.diagnostics if item.code == "SD601")
    assert (loss.severity, loss.help) == ("info", "Nothing to do: `--allow t2d` accepts this loss")
    draft = load(str(CHECKPOINTS / "safeailab-eagle3-clean")).draft
    content = json.loads(out.read_text())
    assert draft is not None
    assert tuple(content["d2t_absolute"]) == draft.draft_to_target
    assert content["keys"]["eagle3.extract_layers"] == [2, 4, 5]
    assert content["keys"]["eagle3.norm_before_residual"] is False
    assert run("safeailab-eagle3-clean", out, "t2d").state == "unchanged"


def test_the_mask_is_a_named_loss(tmp_path: Path) -> None:
    report = run("safeailab-eagle3-clean", tmp_path / "map.json")
    (loss,) = (item for item in report.diagnostics if item.severity == "error")
    assert (loss.code, loss.expected) == ("SD601", "--allow t2d")
    assert not (tmp_path / "map.json").exists()


def test_what_llama_cpp_does_not_hold(tmp_path: Path) -> None:
    assert "SD602" in errors(run("deepseek-mtp-clean", tmp_path / "map.json"))
    assert not (tmp_path / "map.json").exists()


def test_another_file_is_not_replaced_unasked(tmp_path: Path) -> None:
    out = tmp_path / "map.json"
    out.write_text("mine")
    assert errors(run("safeailab-eagle3-clean", out, "t2d")) == ["SD603"]
    assert out.read_text() == "mine"
    assert run("safeailab-eagle3-clean", out, "t2d", is_forced=True).state == "written"
