"""The four drafts trained for SmolLM2 read without errors or warnings, and as their notes say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specctl import checks, formats
from specctl.checkpoint import open_checkpoint
from specctl.draft import DraftCheckpoint
from specctl.ops.convert import convert

ROOT = Path(__file__).resolve().parents[4]
SHARED = Path(os.environ.get("SPECCTL_SHARED", ROOT.parent / "shared")) / "models"
NAMES = (
    "smollm2-135m-eagle3",
    "smollm2-135m-eagle3-safeailab",
    "smollm2-135m-dspark",
    "smollm2-135m-mtp",
)


def draft(name: str) -> DraftCheckpoint:
    place = SHARED / name
    if not place.is_dir():
        pytest.skip(f"no {name}: set SPECCTL_SHARED to the folder that holds models/{name}")
    return formats.read_draft(open_checkpoint(place))


@pytest.mark.parametrize("name", NAMES)
def test_a_real_draft_reads_clean(name: str) -> None:
    read = draft(name)
    found = [*read.diagnostics, *checks.check_draft(read)]
    assert [d.oneline() for d in found if d.severity != "info"] == []
    assert read.unmapped == ()
    assert read.decoder is not None
    assert (read.decoder.hidden_size, read.decoder.head_dim, read.decoder.num_kv_heads) == (
        576,
        64,
        3,
    )
    assert (read.target_vocab_size, read.dtype) == (49152, "BF16")


def test_eagle3_is_the_same_in_both_layouts() -> None:
    nested, flat = draft(NAMES[0]), draft(NAMES[1])
    assert nested.aux_layer_ids == (1, 14, 26)
    assert nested.geometry is not None
    assert nested.geometry.num_speculative_tokens == 5
    assert flat.geometry is None
    assert flat.aux_layer_ids is None
    assert nested.draft_to_target == flat.draft_to_target
    assert nested.decoder == flat.decoder
    assert {r: t.shape for r, t in nested.tensors.items()} == {
        r: t.shape for r, t in flat.tensors.items()
    }
    assert len(nested.tensors) == 15
    assert nested.draft_to_target is not None
    assert nested.draft_to_target[-1] == 49130


def test_dspark_has_six_slots_of_which_five_are_sampled() -> None:
    read = draft(NAMES[2])
    assert read.geometry is not None
    assert (read.geometry.num_speculative_tokens, read.geometry.draft_width) == (5, 6)
    assert read.geometry.sample_from_anchor is False
    assert read.aux_layer_ids == (1, 8, 15, 22, 28)
    assert read.markov is not None
    assert (read.markov.rank, read.markov.kind) == (64, "vanilla")
    assert read.mask_token_id == 16
    assert len(read.tensors) == 32


def test_mtp_follows_layer_30_and_shares_embedding_and_head() -> None:
    read = draft(NAMES[3])
    assert read.target_num_layers == 30
    assert read.aux_layer_ids is None
    assert read.map_kind == "identity"
    sharing = read.sharing()
    assert (sharing.embedding_single_stage, sharing.embedding_multi_stage) == (
        "target",
        "checkpoint",
    )
    assert sharing.head == "target"
    assert len(read.tensors) == 13


def test_the_real_draft_is_written_as_its_other_layout_byte_for_byte(tmp_path: Path) -> None:
    for name in NAMES[:2]:
        draft(name)
    out = tmp_path / "out"
    report = convert(str(SHARED / NAMES[0]), to="specforge-eagle3", out=str(out))
    assert report.state == "written"
    ours, theirs = open_checkpoint(out), open_checkpoint(SHARED / NAMES[1])
    assert sorted(ours.tensors) == sorted(theirs.tensors)
    for key in theirs.tensors:
        assert ours.read_bytes(key) == theirs.read_bytes(key)
    assert ours.config is not None
    assert ours.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 14, 26]
