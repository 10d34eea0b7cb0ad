"""A draft read with the other anchor layout: refused at load, or forced and reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.config import (
    DRAFT_PROPOSERS,
    Overrides,
    draft_width,
    force_anchor,
    resolve_config,
)
from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from specctl.contract.codec import dump_manifest, load_manifest
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import Manifest
from specctl.ops.emit_manifest import emit_manifest
from tests.engine_harness import prompt_of
from tests.tiny import write_tiny_eagle3, write_tiny_target
from tests.tiny_block import BlockCase, write_tiny_block
from tests.tiny_manifest import tiny_manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("anchor")
    target = write_tiny_target(folder / "target", num_layers=2, layer_gain=0.08)
    write_tiny_block(folder / "draft", target, BlockCase(sample_from_anchor=False))
    return folder


def manifest_of(folder: Path) -> Manifest:
    return emit_manifest(str(folder / "target"), str(folder / "draft"), manifest_dir=folder)


def test_a_config_that_contradicts_its_token_count_makes_no_manifest(
    folder: Path, tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    for file in (folder / "draft").iterdir():
        (draft / file.name).write_bytes(file.read_bytes())
    config = json.loads((draft / "config.json").read_text("utf-8"))
    config["sample_from_anchor"] = True  # four tokens from five slots: trained with false
    (draft / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(DiagnosticError) as raised:
        emit_manifest(str(folder / "target"), str(draft), manifest_dir=tmp_path)
    assert "SD302" in [found.code for found in raised.value.diagnostics]


@pytest.mark.parametrize(
    ("edits", "code"),
    [
        ({"sample_from_anchor: false": "sample_from_anchor: true"}, "SD710"),
        (
            {
                "sample_from_anchor: false": "sample_from_anchor: true",
                "draft_width: 5": "draft_width: 4",
            },
            "SD711",
        ),
    ],
)
def test_an_edited_manifest_is_refused_at_load(
    folder: Path, tmp_path: Path, edits: dict[str, str], code: str
) -> None:
    text = dump_manifest(manifest_of(folder))
    for old, new in edits.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = tmp_path / "manifest.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DiagnosticError) as raised:
        load_manifest(path)
    assert {found.code for found in raised.value.diagnostics} == {code}


def test_a_forced_layout_is_reported_and_changes_no_token(folder: Path) -> None:
    path = folder / "manifest.yaml"
    path.write_text(dump_manifest(manifest_of(folder)), encoding="utf-8")
    requests = [
        RequestInput(
            request_id=str(index),
            prompt_ids_target=prompt_of(index, 6),
            max_tokens=24,
            ignore_eos=True,
        )
        for index in range(3)
    ]
    found = {}
    for layout in (None, "sampled"):
        llm = LLM.from_manifest(path, Overrides(device="cpu", force_anchor_layout=layout))
        answers = llm.generate(requests)
        is_forced = any(item.code == "SD840" for item in llm.diagnostics)
        assert is_forced is (layout is not None)
        stats = llm.engine.stats()
        assert llm.config.draft_width == (5 if layout is None else 4)
        assert stats.num_drafts == 4 * stats.num_rounds, "accounting counts gamma drafts"
        found[layout] = (stats.num_accepted_drafts, [answer.ids_target for answer in answers])
    assert found[None][1] == found["sampled"][1]


def test_a_layout_that_changes_nothing_is_reported_and_an_unknown_one_refused(
    folder: Path,
) -> None:
    manifest = manifest_of(folder)
    same, found = force_anchor(manifest, Overrides(force_anchor_layout="conditioning"))
    assert same is manifest
    assert [item.code for item in found] == ["SD805"]
    target_only = emit_manifest(str(folder / "target"), None)
    assert force_anchor(target_only, Overrides(force_anchor_layout="sampled"))[1]
    with pytest.raises(DiagnosticError, match="SD832"):
        force_anchor(manifest, Overrides(force_anchor_layout="first"))


def test_widths_follow_from_proposer_and_count(folder: Path, tmp_path: Path) -> None:
    block = manifest_of(folder)
    assert [draft_width(block, "dspark", gamma) for gamma in (0, 1, 4)] == [0, 2, 5]
    assert draft_width(block, "ngram", 4) == 0
    eagle3 = tiny_manifest(
        folder / "target",
        write_tiny_eagle3(tmp_path / "eagle3", folder / "target", boundary_ids=(0, 1, 2)),
    )
    assert [draft_width(eagle3, "eagle3", gamma) for gamma in (0, 1, 4)] == [0, 1, 1]
    assert draft_width(eagle3, "peagle", 4) == 4
    assert "peagle" in DRAFT_PROPOSERS


@pytest.mark.parametrize(
    ("full", "expected"),
    [(0, [0, 0, 0]), (1, [0, 1, 1]), (4, [0, 1, 4]), (5, [0, 2, 5])],
    ids=["no draft model", "chain", "a slot for each", "and one for the anchor"],
)
def test_a_round_of_fewer_drafts_is_narrower(folder: Path, full: int, expected: list[int]) -> None:
    config = resolve_config(manifest_of(folder), Overrides(device="cpu"))
    config = replace(config, draft_width=full, num_speculative_tokens=4)
    assert [config.draft_width_of(count) for count in (0, 1, 4)] == expected
