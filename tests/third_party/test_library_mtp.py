"""Prediction layers taken out of a target: the library loads ours, and its own are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.checkpoint import open_checkpoint
from specctl.ops.convert import convert
from specctl.ops.given import Given
from tests.third_party.library import Library

TARGETS = ("hf-qwen3-next-mtp", "hf-qwen35-mtp", "hf-qwen35-moe-mtp")
SHARED = ("embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("name", TARGETS)
def test_the_library_loads_what_was_taken_out_of_a_target(
    library: Library, checkpoints: Path, tmp_path: Path, name: str
) -> None:
    target, ours = checkpoints / name, tmp_path / "ours"
    given = Given(num_speculative_tokens=3, target_name=str(target))
    report = convert(str(target), to="speculators", out=str(ours), given=given)
    assert [d.message for d in report.diagnostics if d.severity == "error"] == []
    library.load(ours, may_miss=SHARED).assert_strict()


@pytest.mark.parametrize("name", TARGETS)
def test_the_librarys_own_conversion_has_the_same_tensors(
    library: Library, checkpoints: Path, tmp_path: Path, name: str
) -> None:
    target, ours, theirs = checkpoints / name, tmp_path / "ours", tmp_path / "theirs"
    given = Given(num_speculative_tokens=3, target_name=str(target))
    convert(str(target), to="speculators", out=str(ours), given=given)
    library.convert(target, theirs, target=target, algorithm="mtp")
    own, other = open_checkpoint(ours), open_checkpoint(theirs)
    layers = {key for key in other.tensors if key.startswith("mtp_layers.")}
    assert set(own.tensors) == layers
    for key in layers:
        assert own.tensors[key].shape == other.tensors[key].shape
        assert own.read_bytes(key) == other.read_bytes(key)
