"""The runtime's P-EAGLE drafts give the logits of Speculators 0.9.0's own class at every depth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime.batch import PreparedBatch
from runtime.kv import KVPool
from runtime.loading import load_models
from runtime.models import PEagleModel
from specctl.ops.convert import convert
from specctl.ops.emit_manifest import emit_manifest
from specctl.ops.given import Given
from tests.third_party.library import Library
from tests.third_party.library_configs import config_of_type, ids_of
from tests.third_party.speculators_inputs import SEQUENCE, draft_inputs

ANCHORS = [0, 1, 21, 100, 119]
DEPTHS = 6


def rows_at(positions: torch.Tensor, ids: torch.Tensor) -> PreparedBatch:
    """Return rows of one request whose only KV block is the pool's."""
    return PreparedBatch(
        ids_target_N=ids,
        positions_N=positions,
        slots_N=positions,
        row_request_N=torch.zeros(len(positions), dtype=torch.int32),
        block_tables_BT=torch.zeros((1, 1), dtype=torch.int32),
        max_length=int(positions.max()) + 1,
    )


def ours(model: PEagleModel) -> torch.Tensor:
    """Return the same logits: all entries up to the anchor, then mask rows after it."""
    width = len(model.facts.aux_layer_ids or ()) * model.facts.target_hidden_size
    ids, states = draft_inputs(model.embedding_VH.shape[0], width)
    rollouts = []
    for anchor in ANCHORS:
        pool = KVPool(
            model.kv_specs,
            num_blocks=1,
            kv_block_size=SEQUENCE + DEPTHS,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        known = torch.arange(anchor + 1)
        entries = model.forward(rows_at(known, ids[known]), model.fuse(states[known]), pool.layers)
        later = anchor + torch.arange(1, DEPTHS)
        masks = torch.full((DEPTHS - 1,), model.mask_id_target)
        masked = model.forward_masked(rows_at(later, masks), pool.layers)
        heads = torch.cat((entries.head_input_NH[-1:], masked.head_input_NH))
        rollouts.append(model.logits(heads))
    return torch.stack(rollouts)


def assert_equal_to(library: Library, draft: Path, target: Path) -> None:
    models = load_models(
        emit_manifest(str(target), str(draft), manifest_dir=draft),
        draft,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    assert isinstance(models.draft, PEagleModel)
    expected = library.rollouts(draft, ANCHORS, DEPTHS)
    # float32 on both sides, sums in another order.
    torch.testing.assert_close(ours(models.draft), expected, atol=3e-5, rtol=1e-4)
    assert not torch.allclose(expected[:, 1], expected[:, 2], atol=1e-4)


@pytest.mark.parametrize("name", ["peagle-clean", "peagle-depths", "speculators-peagle-clean"])
def test_logits_are_the_librarys(
    library: Library, checkpoints: Path, tmp_path: Path, name: str
) -> None:
    target, draft = checkpoints / "hf-llama-tiny", tmp_path / "draft"
    report = convert(
        str(checkpoints / name),
        to="speculators-peagle",
        out=str(draft),
        target=str(target),
        given=Given(target_name=str(target), num_speculative_tokens=4),
    )
    assert report.state == "written", [d.message for d in report.diagnostics]
    assert_equal_to(library, draft, target)


@pytest.mark.parametrize(
    "flags",
    [
        {"norm_before_residual": True, "norm_before_fc": True},
        {"fc_norm": True},
        {"transformer_layer_config": {"num_hidden_layers": 3}},
        {
            "transformer_layer_config": {
                "model_type": "qwen3",
                "layer_types": ["sliding_attention"],
                "sliding_window": 12,
                "use_sliding_window": True,
                "max_window_layers": 0,
            }
        },
    ],
)
def test_flags_and_layers(
    library: Library, checkpoints: Path, tmp_path: Path, flags: dict[str, object]
) -> None:
    target, draft = checkpoints / "hf-llama-clean", tmp_path / "draft"
    config = config_of_type("peagle", target)
    layers = flags.get("transformer_layer_config", {})
    assert isinstance(layers, dict)
    config |= flags | {"transformer_layer_config": config["transformer_layer_config"] | layers}
    library.build(draft, config, ids_of("peagle"))
    assert_equal_to(library, draft, target)
