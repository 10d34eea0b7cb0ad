"""Prediction layers through inspect, convert and stitch; put back, they give the same files."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.ops.convert import convert
from specctl.ops.given import Given
from specctl.ops.inspect import inspect
from specctl.ops.load import load
from specctl.ops.stitch import stitch
from tests.unit.specctl.formats.edits import CHECKPOINTS
from tests.unit.specctl.formats.test_mtp_families import BUNDLED

GIVEN = Given(num_speculative_tokens=3, target_name="example/target")


def assert_put_back(name: str, format: str, directory: Path) -> None:
    whole, part, again = CHECKPOINTS / name, directory / "part", directory / "again"
    convert(str(whole), to=format, out=str(part), given=GIVEN)
    report = stitch(str(part), str(whole), out=str(again))
    assert [d.message for d in report.diagnostics if d.severity == "error"] == []
    for file in whole.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_a_slice_put_back_gives_the_same_files(name: str, tmp_path: Path) -> None:
    bundled = load(str(CHECKPOINTS / name)).detection.bundled
    assert bundled is not None
    assert_put_back(name, bundled, tmp_path)


@pytest.mark.parametrize("name", ["hf-qwen3-next-mtp", "hf-qwen35-mtp", "hf-qwen35-moe-mtp"])
def test_a_speculators_draft_put_back_gives_the_same_files(name: str, tmp_path: Path) -> None:
    assert_put_back(name, "speculators-mtp", tmp_path)


def test_layers_of_another_target_are_put_into_one_that_lost_its_own(tmp_path: Path) -> None:
    """The config promises layers that are not there (SD327); afterwards they are, and it is not."""
    bare, part = CHECKPOINTS / "hf-qwen35-mtp-bare", tmp_path / "part"
    convert(str(CHECKPOINTS / "hf-qwen35-mtp"), to="qwen-mtp", out=str(part), given=GIVEN)
    assert "SD327" in {d.code for d in load(str(bare)).diagnostics}
    stitch(str(part), str(bare), out=str(tmp_path / "whole"))
    made = load(str(tmp_path / "whole"))
    assert made.bundled is not None
    assert len(made.bundled.tensors) == 15
    assert {d.code for d in made.diagnostics} == {"SD203", "SD507"}


def test_an_assistants_head_is_shown_as_its_own_embedding() -> None:
    report = inspect(str(CHECKPOINTS / "gemma4-assistant-clean"))
    head, embedding = report.sharing.head, report.sharing.embedding
    assert head is not None
    assert embedding is not None
    assert (head.origin, head.tensor) == ("tied", embedding.tensor)


def test_the_report_of_a_target_has_what_is_bundled() -> None:
    report = inspect(str(CHECKPOINTS / "hf-deepseek-v3-mtp"))
    assert report.bundled is not None
    assert (report.bundled.format, report.bundled.num_layers) == ("deepseek-mtp", 1)
    assert report.bundled.embedding == "model.layers.1.embed_tokens.weight"
    assert report.bundled.details["concat_order"] == "embedding, hidden"
    assert [ref.key for ref in report.sharing.decoys] == ["model.layers.1.embed_tokens.weight"]
    assert report.sharing.head_decided_by == "config.json#/tie_word_embeddings"
    parts = {part.name: part.num_tensors for part in report.tensors.parts}
    assert parts == {"bundled": 46, "trunk": 15, "embedding": 1, "head": 1}
