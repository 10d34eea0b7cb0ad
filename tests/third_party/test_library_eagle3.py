"""Speculators 0.9.0 loads what we convert to EAGLE-3, and computes what its own converter gives."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specctl.checkpoint import open_checkpoint, write_safetensors
from specctl.ops.convert import convert
from specctl.ops.given import Given
from tests.third_party.library import Library


def given(target: Path) -> Given:
    return Given(num_speculative_tokens=4, target_name=str(target))


def test_safeailab_loads_strictly_and_computes_the_same(
    library: Library, checkpoints: Path, tmp_path: Path
) -> None:
    source, target = checkpoints / "safeailab-eagle3-clean", checkpoints / "hf-llama-clean"
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    report = convert(
        str(source), to="speculators", out=str(ours), target=str(target), given=given(target)
    )
    assert report.state == "written"
    loaded = library.load(ours)
    assert loaded.type == "Eagle3DraftModel"
    loaded.assert_strict()

    library.convert(
        source,
        theirs,
        target=target,
        algorithm="eagle3",
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        norm_before_residual=False,
    )
    other = library.load(theirs)
    assert loaded.digests == other.digests


@pytest.mark.parametrize("dialect", ["eagle3", "specforge", "modelopt"])
def test_the_logits_survive_a_round_trip(
    library: Library, checkpoints: Path, tmp_path: Path, dialect: str
) -> None:
    target = checkpoints / "hf-llama-clean"
    first, between, last = (tmp_path / name for name in ("first", "between", "last"))
    options = {"target": str(target), "given": given(target)}
    source = str(checkpoints / "safeailab-eagle3-clean")
    convert(source, to="speculators", out=str(first), **options)
    assert convert(str(first), to=dialect, out=str(between), **options).state == "written"
    assert convert(str(between), to="speculators", out=str(last), **options).state == "written"
    before, after = library.trace(first), library.trace(last)
    assert before["is_finite"]
    assert before == after


def test_a_strict_load_notices_what_is_missing(
    library: Library, checkpoints: Path, tmp_path: Path
) -> None:
    """The harness itself: the library loads such a file without a word."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    target = checkpoints / "hf-llama-clean"
    convert(
        str(checkpoints / "safeailab-eagle3-clean"),
        to="speculators",
        out=str(whole),
        target=str(target),
        given=given(target),
    )
    broken.mkdir()
    shutil.copy(whole / "config.json", broken)
    opened = open_checkpoint(whole)
    write_safetensors(
        broken / "model.safetensors",
        {
            key: (entry.dtype, entry.shape, opened.read_bytes(key))
            for key, entry in opened.tensors.items()
            if key != "embed_tokens.weight"
        },
        {"format": "pt"},
    )
    loaded = library.load(broken)
    assert loaded.missing == ("embed_tokens.weight",)
    with pytest.raises(AssertionError):
        loaded.assert_strict()
