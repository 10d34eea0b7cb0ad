"""Maps of DSpark drafts: head and w2 have draft ids, w1 target ids, and a step feeds target ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runtime.batch import RoundRequests
from runtime.loading import load_models
from runtime.models import BlockModel
from runtime.spec.block import _Chooser
from runtime.spec.block_round import read_block
from specctl.contract.diagnostics import DiagnosticError
from specctl.ops.emit_manifest import emit_manifest
from tests.tiny import write_tiny_target
from tests.tiny_block import BlockCase, write_tiny_block
from tests.tiny_manifest import load_tiny
from tests.tiny_pair import edit_tensors

CHECKPOINTS = Path(__file__).parents[4] / "fixtures" / "checkpoints"


def test_a_token_map_picks_rows_of_head_and_markov_head(tmp_path: Path) -> None:
    ids = [2, 5, 7, 11, 23, 40]
    (tmp_path / "map.json").write_text(json.dumps(ids), "utf-8")
    draft = CHECKPOINTS / "deepspec-dspark-clean"
    manifest = emit_manifest(
        str(CHECKPOINTS / "hf-llama-tiny"),
        str(draft),
        token_map=str(tmp_path / "map.json"),
        manifest_dir=tmp_path,
    )
    model = load_models(manifest, tmp_path, device=torch.device("cpu"), dtype=torch.float32).draft
    assert isinstance(model, BlockModel)
    assert model.markov is not None
    stored = load_file(draft / "model.safetensors")
    assert model.draft_to_target_R.tolist() == ids
    assert torch.equal(model.head_RH, stored["lm_head.weight"].float()[ids])
    w2 = stored["markov_head.markov_w2.weight"].float()
    assert torch.equal(model.markov.w2_RM, w2[ids])
    assert model.markov.w1_VM.shape[0] == w2.shape[0]


def test_a_map_in_reversed_order_is_followed_at_every_step(tmp_path: Path) -> None:
    """C043: three steps by hand; a draft id taken for a target id gives other drafts."""
    target = write_tiny_target(tmp_path / "target", num_layers=2)
    draft = write_tiny_block(tmp_path / "draft", target, BlockCase(draft_vocab_size=40))

    def reverse(tensors: dict[str, torch.Tensor]) -> None:
        ids = tensors["d2t"] + torch.arange(40)
        tensors["d2t"] = ids.flip(0) - torch.arange(40)

    edit_tensors(draft, reverse)
    model = load_tiny(emit_manifest(str(target), str(draft))).draft
    assert isinstance(model, BlockModel)
    assert model.markov is not None
    ids_target_R = model.draft_to_target_R
    assert (ids_target_R.diff() < 0).all()
    generator = torch.Generator().manual_seed(9)
    hidden_BWH = torch.randn((1, 3, model.head_RH.shape[1]), generator=generator)
    empty, newest = torch.zeros(0, dtype=torch.int64), torch.tensor([50])
    requests = RoundRequests(
        slots_B=torch.zeros(1, dtype=torch.int64), lengths_B=empty, newest_ids_target_B=newest,
        num_drafts_B=empty, block_tables_BT=empty, positions_BW=empty, kv_slots_BW=empty,
        positions_WB=empty, kv_slots_WB=empty, ids_target_BW=torch.zeros_like(newest.repeat(1, 4)),
        row_request_BW=empty, row_request_B=empty, max_length=1,
    )  # fmt: skip
    read_block(model, _Chooser(draft_to_target_R=ids_target_R), hidden_BWH, requests)
    found = requests.drafts_BG
    previous, expected, mistaken = 50, [], []
    for k in range(3):
        bias_R = model.markov.w2_RM @ model.markov.w1_VM[previous]
        best = int((model.head_RH @ hidden_BWH[0, k] + bias_R).argmax())
        previous = int(ids_target_R[best])
        expected.append(previous)
        mistaken.append(best)
    assert found.tolist() == [expected]
    assert expected != mistaken


def test_swapped_markov_factors_are_named(tmp_path: Path) -> None:
    """C043: w1 has a row for each target id, w2 for each draft id."""
    target = write_tiny_target(tmp_path / "target", num_layers=2)
    draft = write_tiny_block(tmp_path / "draft", target, BlockCase(draft_vocab_size=40))
    first, second = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    edit_tensors(draft, swap)
    with pytest.raises(DiagnosticError) as caught:
        emit_manifest(str(target), str(draft))
    places = " ".join(d.where for d in caught.value.diagnostics)
    assert first in places
    assert second in places
