"""Variants of EAGLE-3 that only other engines compute are refused by `manifest`, with the part."""

from __future__ import annotations

import pytest

from specctl.contract.diagnostics import DiagnosticError
from specctl.ops.emit_manifest import emit_manifest
from specctl.ops.load import load
from tests.unit.specctl.formats.edits import CHECKPOINTS, draft


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deepspec-eagle3-two-layers", "has `layers.1.hidden_norm`"),
        ("modelopt-eagle3-parallel-heads", "has `parallel_draft_heads.0."),
        ("modelopt-eagle3-last-state-only", "lacks `fc.weight`"),
        ("mla-eagle3-clean", "mla attention"),
    ],
)
def test_a_variant_is_refused_with_what_stands_in_the_way(name: str, words: str) -> None:
    with pytest.raises(DiagnosticError) as raised:
        emit_manifest(
            str(CHECKPOINTS / "hf-llama-tiny"),
            str(CHECKPOINTS / name),
            num_speculative_tokens=3,
        )
    (found,) = [d for d in raised.value.diagnostics if d.code == "SD716"]
    assert words in found.message


@pytest.mark.parametrize(
    ("target", "name", "act"),
    [
        ("hf-llama-gelu", None, "gelu_pytorch_tanh"),
        ("hf-llama-tiny", "speculators-eagle3-relu", "relu"),
    ],
)
def test_an_activation_is_a_note_to_validate_and_refused_by_manifest(
    target: str, name: str | None, act: str
) -> None:
    (said,) = load(str(CHECKPOINTS / (name or target))).diagnostics
    assert (said.code, said.severity, said.found) == ("SD813", "info", act)
    with pytest.raises(DiagnosticError) as raised:
        emit_manifest(str(CHECKPOINTS / target), None if name is None else str(CHECKPOINTS / name))
    (found,) = raised.value.diagnostics
    assert (found.code, found.expected, found.found) == ("SD716", "silu", act)


def test_a_draft_without_its_last_norm_is_no_manifest() -> None:
    switched_off = {"eagle_config.use_last_layernorm": False}
    read = draft("modelopt-eagle3-clean", switched_off, drop=("norm.weight",))
    assert read.to_draft(source=".", revision=None) is None


@pytest.mark.parametrize(
    "name",
    [
        "specforge-eagle3-clean",
        "deepspec-eagle3-clean",
        "nemo-eagle3-clean",
        "modelopt-eagle3-clean",
    ],
)
def test_flat_dialects_are_served_like_any_eagle3_draft(name: str) -> None:
    emitted = emit_manifest(
        str(CHECKPOINTS / "hf-llama-tiny"),
        str(CHECKPOINTS / name),
        num_speculative_tokens=3,
    )
    assert emitted.draft is not None
    assert emitted.draft.algorithm == "eagle3"
    assert emitted.draft.format == name[: -len("-clean")]


@pytest.mark.parametrize("name", ["peagle-clean", "peagle-depths", "speculators-peagle-clean"])
def test_a_parallel_draft_is_described_with_a_slot_for_each_token(name: str) -> None:
    emitted = emit_manifest(
        str(CHECKPOINTS / "hf-llama-tiny"), str(CHECKPOINTS / name), num_speculative_tokens=3
    )
    assert emitted.draft is not None
    assert emitted.draft.algorithm == "peagle"
    assert emitted.draft.mask_token_id is not None
    assert "mask_hidden" in emitted.draft.tensors
    assert emitted.geometry.draft_width == emitted.geometry.num_speculative_tokens == 3
    assert emitted.geometry.verify_width == 4
