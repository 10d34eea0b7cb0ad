"""`specctl plan`: rows, ranks, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from specctl.cli.app import run
from specctl.contract.codec import load_manifest
from specctl.contract.diagnostics import DiagnosticError
from specctl.ops.plan import plan, plan_problems

MANIFEST = Path(__file__).parents[4] / "fixtures" / "manifests" / "v1" / "speculators-eagle3.yaml"


def test_rows_cover_the_layers_in_order() -> None:
    report = plan(MANIFEST, pipeline_parallel=2)
    assert [row.layers[0] for row in report.stages] == [0, report.stages[0].num_layers]
    assert report.stages[0].has_embedding
    assert report.stages[-1].draft_embedding in ("own", "checkpoint", "head")
    assert report.balance >= 1.0


def test_a_rank_that_does_not_divide_names_every_dimension() -> None:
    with pytest.raises(DiagnosticError) as caught:
        plan(MANIFEST, tensor_parallel=7)
    found = {item.where.rsplit("/", 1)[1] for item in caught.value.diagnostics}
    assert {item.code for item in caught.value.diagnostics} == {"SD852"}
    assert found == {"num_attention_heads", "num_kv_heads", "intermediate_size"}


def test_the_command_prints_a_line_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(MANIFEST), "--pp", "2", "--stage-layers", "3,5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("0      0-2 (3)")
    assert "draft (embedding:" in lines[2]


def test_the_command_gives_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(MANIFEST), "--pp", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pipeline_parallel"] == 2


def test_stage_layers_that_are_no_numbers_are_wrong_usage() -> None:
    assert run(["plan", str(MANIFEST), "--stage-layers", "a"]) == 2


def test_a_draft_whole_on_every_rank_counts_whole_and_need_not_divide() -> None:
    manifest = load_manifest(MANIFEST)
    assert manifest.draft is not None
    odd = msgspec.structs.replace(manifest.draft.decoder, num_kv_heads=3)
    changed = msgspec.structs.replace(
        manifest, draft=msgspec.structs.replace(manifest.draft, decoder=odd)
    )
    assert plan_problems(changed, 2, None)
    assert not plan_problems(changed, 2, 1)
    split, whole = (
        plan(MANIFEST, tensor_parallel=2, draft_tensor_parallel=count).stages[-1]
        for count in (2, 1)
    )
    assert whole.rank_bytes - split.rank_bytes == split.draft_bytes - split.draft_bytes // 2


def test_another_number_of_draft_ranks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(MANIFEST), "--tp", "2", "--draft-tp", "3"]) == 1
    assert "SD832" in capsys.readouterr().err
    assert run(["plan", str(MANIFEST), "--tp", "2", "--draft-tp", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "draft: on the last stage, pp=1, tp=1"
