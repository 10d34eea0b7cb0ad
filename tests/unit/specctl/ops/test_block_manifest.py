"""Manifests of block drafts: which are described, and how a variant is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from specctl.contract.codec import dump_manifest, parse_manifest
from specctl.contract.consistency import check_manifest
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import BlockDraft, CandidateSelector, LocalConvolution
from specctl.ops.emit_manifest import emit_manifest

CHECKPOINTS = Path(__file__).parents[4] / "fixtures" / "checkpoints"
TARGET = str(CHECKPOINTS / "hf-llama-tiny")


def edited(source: str, out: Path, edits: dict[str, object]) -> str:
    """Copy a draft and set fields of its config, `a.b` for a nested one."""
    shutil.copytree(CHECKPOINTS / source, out)
    config = json.loads((out / "config.json").read_text("utf-8"))
    for path, value in edits.items():
        *parents, key = path.split(".")
        place = config
        for parent in parents:
            place = place[parent]
        place[key] = value
    (out / "config.json").write_text(json.dumps(config), "utf-8")
    return str(out)


@pytest.mark.parametrize(
    ("name", "algorithm", "gamma", "width"),
    [
        ("speculators-dspark-gated", "dspark", 5, 5),
        ("speculators-dspark-anchor-false", "dspark", 4, 5),
        ("modelopt-dspark-clean", "dspark", 5, 5),
        ("speculators-dflash-clean", "dflash", 4, 5),
        ("zlab-dflash-clean", "dflash", 4, 5),
    ],
)
def test_block_drafts_are_described(name: str, algorithm: str, gamma: int, width: int) -> None:
    manifest = emit_manifest(TARGET, str(CHECKPOINTS / name))
    assert manifest.draft is not None
    assert manifest.draft.algorithm == algorithm
    assert manifest.geometry.num_speculative_tokens == gamma
    assert manifest.geometry.draft_width == width
    assert manifest.draft.block is None
    assert parse_manifest(dump_manifest(manifest), name="again.yaml") == manifest


def test_an_override_of_the_mask_is_a_fact_and_counts_for_the_fingerprint(tmp_path: Path) -> None:
    plain = emit_manifest(TARGET, str(CHECKPOINTS / "zlab-dflash-clean"))
    draft = edited("zlab-dflash-clean", tmp_path / "draft", {"dflash_config.causal": True})
    manifest = emit_manifest(TARGET, draft)
    assert manifest.draft is not None
    assert manifest.draft.block == BlockDraft(is_causal=True)
    assert manifest.fingerprint != plain.fingerprint
    assert parse_manifest(dump_manifest(manifest), name="again.yaml") == manifest


def test_a_dflash2_draft_states_its_convolutions_and_selector() -> None:
    manifest = emit_manifest(TARGET, str(CHECKPOINTS / "zlab-dflash2-clean"))
    assert manifest.draft is not None
    assert manifest.draft.algorithm == "dflash2"
    assert manifest.draft.block == BlockDraft(
        convolution=LocalConvolution(kernel_size=2, group_size=5),
        selector=CandidateSelector(rank=3, top_k=4),
    )
    assert parse_manifest(dump_manifest(manifest), name="again.yaml") == manifest


def test_a_number_that_no_layer_applies_is_refused_by_name(tmp_path: Path) -> None:
    draft = edited("zlab-dflash-clean", tmp_path / "draft", {"dflash_config.output_multiplier": 2})
    with pytest.raises(DiagnosticError) as raised:
        emit_manifest(TARGET, draft)
    (found,) = [d for d in raised.value.diagnostics if d.code == "SD716"]
    assert "`output_multiplier`" in found.message


@pytest.mark.parametrize("name", ["speculators-dspark-clean", "speculators-dspark-anchor-false"])
def test_the_other_anchor_layout_contradicts_the_widths(name: str) -> None:
    """The same weights read one slot off accept next to nothing, without any error."""
    target = str(CHECKPOINTS / ("hf-llama-clean" if "clean" in name else "hf-llama-tiny"))
    manifest = emit_manifest(target, str(CHECKPOINTS / name))
    geometry = manifest.geometry
    turned = msgspec.structs.replace(
        manifest,
        geometry=msgspec.structs.replace(
            geometry, sample_from_anchor=not geometry.sample_from_anchor
        ),
    )
    assert {d.code for d in check_manifest(turned)} == {"SD710"}
    tokens = (
        geometry.draft_width if turned.geometry.sample_from_anchor else geometry.draft_width - 1
    )
    with_widths = msgspec.structs.replace(
        turned,
        geometry=msgspec.structs.replace(
            turned.geometry, num_speculative_tokens=tokens, verify_width=tokens + 1
        ),
    )
    assert {d.code for d in check_manifest(with_widths)} == {"SD711"}


def test_a_chain_has_no_block_facts() -> None:
    manifest = emit_manifest(
        str(CHECKPOINTS / "hf-llama-clean"), str(CHECKPOINTS / "speculators-eagle3-clean")
    )
    assert manifest.draft is not None
    odd = msgspec.structs.replace(
        manifest, draft=msgspec.structs.replace(manifest.draft, block=BlockDraft())
    )
    assert {d.where for d in check_manifest(odd)} == {"manifest#/draft/block"}
