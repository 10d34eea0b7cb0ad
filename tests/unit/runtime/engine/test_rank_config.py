"""`--tp` and `--draft-tp`: honoured, or refused with numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.config import Overrides, resolve_config
from runtime.config.memory import affordable_blocks
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import Manifest
from tests.tiny import Sizes, write_tiny_eagle3, write_tiny_target
from tests.tiny_manifest import tiny_manifest

GIB = 1 << 30
THREE = Sizes(hidden=36, heads=9, kv_heads=3, head_dim=4, inner=48)
FOUR = Sizes(hidden=32, heads=4, kv_heads=4, head_dim=8, inner=64)


def manifest_of(directory: Path, sizes: Sizes) -> Manifest:
    """A target and a draft of 4 heads, 2 KV heads and 48 intermediate features."""
    target = write_tiny_target(directory / "t", num_layers=2, sizes=sizes)
    draft = write_tiny_eagle3(directory / "d", target, boundary_ids=(0, 1, 2))
    return tiny_manifest(target, draft)


def refusal(manifest: Manifest, **given: object) -> list[str]:
    with pytest.raises(DiagnosticError) as caught:
        resolve_config(manifest, Overrides(device="cpu", **given), free_bytes=GIB)  # type: ignore[arg-type]
    return [f"{item.code} {item.where} {item.found}" for item in caught.value.diagnostics]


def test_heads_that_do_not_divide_are_refused_with_numbers(tmp_path: Path) -> None:
    """Nine heads and three KV heads, as SmolLM2-135M has: three ranks, not two."""
    manifest = manifest_of(tmp_path, THREE)
    assert refusal(manifest, tensor_parallel=2, proposer="none") == [
        "SD852 manifest#/target/decoder/num_attention_heads 2",
        "SD852 manifest#/target/decoder/num_kv_heads 2",
    ]
    assert refusal(manifest, tensor_parallel=3) == [
        "SD852 manifest#/draft/decoder/num_attention_heads 3",
        "SD852 manifest#/draft/decoder/num_kv_heads 3",
    ]
    config = resolve_config(
        manifest,
        Overrides(device="cpu", tensor_parallel=3, draft_tensor_parallel=1),
        free_bytes=GIB,
    )
    assert (config.tensor_parallel, config.draft_tensor_parallel) == (3, 1)


def test_a_draft_has_the_ranks_of_the_target_or_one(tmp_path: Path) -> None:
    """Field case C057: the option is honoured, or refused with the values that are allowed."""
    manifest = manifest_of(tmp_path, FOUR)
    assert (
        resolve_config(manifest, Overrides(device="cpu", tensor_parallel=2)).origins[
            "draft_tensor_parallel"
        ]
        == "derived"
    )
    for tensor_parallel, draft, expected in ((2, 3, "1 or 2"), (4, 2, "1 or 4"), (1, 2, "1")):
        given = {"tensor_parallel": tensor_parallel, "draft_tensor_parallel": draft}
        assert refusal(manifest, **given) == [f"SD832 --draft-tp {draft}"]
        with pytest.raises(DiagnosticError, match=rf"(?s)the target has {tensor_parallel} ranks"):
            resolve_config(manifest, Overrides(device="cpu", **given))
        with pytest.raises(DiagnosticError) as caught:
            resolve_config(manifest, Overrides(device="cpu", **given))
        assert caught.value.diagnostics[0].expected == expected


def test_a_draft_option_without_a_draft_has_no_effect(tmp_path: Path) -> None:
    overrides = Overrides(device="cpu", tensor_parallel=2, draft_tensor_parallel=2, proposer="none")
    config = resolve_config(manifest_of(tmp_path, FOUR), overrides, free_bytes=GIB)
    assert [item.code for item in config.diagnostics] == ["SD805"]
    assert config.draft_tensor_parallel == 1


def test_how_long_ranks_wait_for_each_other(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, FOUR)
    given = Overrides(device="cpu", rank_timeout_s=5)
    alone = resolve_config(manifest, given, free_bytes=GIB)
    assert [(item.code, item.where) for item in alone.diagnostics] == [
        ("SD805", "--rank-timeout-s")
    ]
    two = resolve_config(manifest, replace(given, tensor_parallel=2), free_bytes=GIB)
    assert (two.rank_timeout_s, two.origins["rank_timeout_s"]) == (5, "given")
    plain = resolve_config(manifest, Overrides(device="cpu", pipeline_parallel=2), free_bytes=GIB)
    assert (plain.rank_timeout_s, plain.origins["rank_timeout_s"]) == (120, "default")
    assert refusal(manifest, tensor_parallel=2, rank_timeout_s=0.1) == [
        "SD832 --rank-timeout-s 0.1"
    ]


def test_what_reads_a_whole_head_or_a_clock_is_refused(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, FOUR)
    given = {"dynamic_rows": 8, "dynamic_rank": 4}
    assert refusal(manifest, tensor_parallel=2, **given) == [
        "SD832 --dynamic-rows 8",
        "SD832 --dynamic-rank 4",
    ]
    assert refusal(manifest, tensor_parallel=2, length_mode="compact") == [
        "SD832 --length-mode compact"
    ]
    assert refusal(manifest, tensor_parallel=2, force_anchor_layout="sampled") == [
        "SD832 --force-anchor-layout sampled"
    ]


def test_ranks_of_other_devices_hold_more_blocks_together(tmp_path: Path) -> None:
    """On CPUs ranks share the memory of the host."""
    manifest = manifest_of(tmp_path, FOUR)
    counts = [
        affordable_blocks(
            manifest,
            torch.float32,
            kv_block_size=16,
            with_draft=True,
            budget_bytes=GIB,
            num_ranks=ranks,
            shares_memory=shares,
        )
        for ranks, shares in ((1, False), (2, False), (2, True))
    ]
    assert counts[1] >= 2 * counts[0]
    assert counts[2] == counts[0]
