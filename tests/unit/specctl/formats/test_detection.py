"""Detection looks at config and tensors, decides once, and says why."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from specctl import formats
from specctl.checkpoint import open_checkpoint
from specctl.contract.diagnostics import DiagnosticError
from tests.unit.specctl.formats.edits import CHECKPOINTS, DELETE, opened


@pytest.mark.parametrize(
    ("name", "role", "format"),
    [
        ("hf-llama-clean", "target", "huggingface"),
        ("hf-gpt2-unsupported", "target", "huggingface"),
        ("hf-llama-bundled-mtp", "target", "huggingface"),
        ("speculators-eagle3-clean", "draft", "speculators-eagle3"),
        ("speculators-dspark-no-markov", "draft", "speculators-dspark"),
        ("speculators-mtp-clean", "draft", "speculators-mtp"),
        ("safeailab-eagle3-clean", "draft", "safeailab-eagle3"),
        ("modelopt-eagle3-sorted", "draft", "modelopt-eagle3"),
        ("deepseek-mtp-clean", "draft", "deepseek-mtp"),
    ],
)
def test_a_fixture_has_its_format(name: str, role: str, format: str) -> None:
    found = formats.detect(opened(name))
    assert (found.role, found.format) == (role, format)
    assert found.evidence


def test_the_directory_name_is_never_a_hint(tmp_path: Path) -> None:
    """Field report C011: a draft in a directory named after other methods."""
    place = tmp_path / "my-dspark-mtp-eagle1-target-model"
    shutil.copytree(CHECKPOINTS / "safeailab-eagle3-clean", place)
    renamed, original = (
        formats.detect(open_checkpoint(place)),
        formats.detect(opened("safeailab-eagle3-clean")),
    )
    assert renamed == original


def test_a_draft_with_an_embedding_spelled_like_a_targets_stays_a_draft() -> None:
    with_embedding = opened("safeailab-eagle3-clean", add={"model.embed_tokens.weight": (64, 16)})
    assert formats.detect(with_embedding).format == "safeailab-eagle3"
    assert "embedding" in formats.read_draft(with_embedding).tensors


def test_a_speculators_type_that_is_not_read_is_named() -> None:
    found = formats.detect(opened("speculators-dspark-clean", {"speculators_model_type": "mlp"}))
    assert [d.code for d in found.diagnostics] == ["SD205"]
    assert "`mlp`" in found.diagnostics[0].message


def test_a_speculators_type_with_the_tensors_of_another_is_a_conflict() -> None:
    found = formats.detect(opened("speculators-dspark-clean", {"speculators_model_type": "peagle"}))
    assert [d.code for d in found.diagnostics] == ["SD202"]
    assert "peagle" in found.diagnostics[0].message


def test_dspark_tensors_name_the_format_and_a_nested_config_does_not_fill_a_flat_one() -> None:
    checkpoint = opened("speculators-dspark-clean", {"speculators_model_type": DELETE})
    assert formats.detect(checkpoint).format == "deepspec-dspark"
    read = formats.read_draft(checkpoint)
    assert read.decoder is None
    assert "SD206" in {d.code for d in read.diagnostics}


def test_a_foreign_tensor_contradicts_a_speculators_config() -> None:
    found = formats.detect(opened("speculators-eagle3-clean", add={"mask_hidden": (1, 1, 48)}))
    assert [d.code for d in found.diagnostics] == ["SD202"]


def test_a_config_alone_decides_when_no_tensor_could_be_read() -> None:
    target = replace(opened("hf-llama-clean"), tensors={})
    assert formats.detect(target).format == "huggingface"
    draft = replace(opened("safeailab-eagle3-clean"), tensors={})
    assert formats.detect(draft).format == "safeailab-eagle3"


def test_reading_in_the_wrong_role_is_refused_with_the_evidence() -> None:
    with pytest.raises(DiagnosticError) as target_as_draft:
        formats.read_draft(opened("hf-llama-clean"))
    with pytest.raises(DiagnosticError) as draft_as_target:
        formats.read_target(opened("speculators-eagle3-clean"))
    for raised in (target_as_draft, draft_as_target):
        (found,) = raised.value.diagnostics
        assert found.code == "SD201"
        assert "model.embed_tokens.weight" in found.where or "speculators_model_type" in found.where


def test_an_unknown_layout_is_refused_by_both_readers() -> None:
    for read in (formats.read_draft, formats.read_target):
        with pytest.raises(DiagnosticError, match="SD201"):
            read(opened("unknown-names"))
