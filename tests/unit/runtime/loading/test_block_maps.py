"""A token map over a DSpark draft of the whole vocabulary: head and w2 lose the same rows."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from runtime.loading import load_models
from runtime.models import BlockModel
from specctl.ops.emit_manifest import emit_manifest

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
