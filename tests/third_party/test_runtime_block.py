"""The runtime's block drafts give the logits of Speculators 0.9.0's own classes, slot by slot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.batch import PreparedBatch
from runtime.kv import KVPool
from runtime.loading import load_models
from runtime.models import BlockModel, BlockRows
from specctl.ops.convert import convert
from specctl.ops.emit_manifest import emit_manifest
from specctl.ops.given import Given
from tests.third_party.library import Library
from tests.third_party.speculators_inputs import SEQUENCE, draft_inputs

ANCHORS = [0, 1, 21, 100]
BLOCK = 5
SLIDING: dict[str, object] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 12,
    "use_sliding_window": True,
    "max_window_layers": 1,
}
NAMES = [
    "speculators-dflash-clean",
    "speculators-dflash2-clean",
    "zlab-dflash2-clean",
    "speculators-dspark-anchor-false",
    "speculators-dspark-gated",
    "speculators-dspark-rnn",
    "speculators-dspark-no-markov",
    "deepspec-dspark-clean",
]


def draft_at(source: Path, target: Path, out: Path, **edits: object) -> Path:
    """Write the draft in the library's layout, its target named, and edit its config."""
    algorithm = source.name.split("-")[1]  # deepspec-dspark-clean -> dspark
    report = convert(
        str(source),
        to=f"speculators-{algorithm}",
        out=str(out),
        target=str(target),
        given=Given(target_name=str(target)),
    )
    assert report.state == "written", [d.message for d in report.diagnostics]
    config = json.loads((out / "config.json").read_text("utf-8"))
    layers = edits.pop("layers", {})
    assert isinstance(layers, dict)
    config["transformer_layer_config"] |= layers
    config |= edits
    if "sample_from_anchor" in edits:
        tokens = BLOCK if edits["sample_from_anchor"] else BLOCK - 1
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = tokens
    (out / "config.json").write_text(json.dumps(config), "utf-8")
    return out


def model_of(draft: Path, target: Path) -> BlockModel:
    models = load_models(
        emit_manifest(str(target), str(draft), manifest_dir=draft),
        draft,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    assert isinstance(models.draft, BlockModel)
    return models.draft


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


def ours(model: BlockModel, anchor: int) -> dict[str, torch.Tensor | None]:
    """Return the same numbers of one block, its tokens given as in training."""
    width = len(model.facts.aux_layer_ids or ()) * model.facts.target_hidden_size
    ids, states = draft_inputs(model.embedding_VH.shape[0], width)
    pool = KVPool(
        model.kv_specs,
        num_blocks=1,
        kv_block_size=SEQUENCE + BLOCK,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    if anchor:
        context = rows_at(torch.arange(anchor), ids[:anchor])
        model.write_context(context, states[:anchor], pool.layers)
    slots = torch.full((BLOCK,), model.mask_id_target)
    slots[0] = ids[anchor]
    positions = anchor + torch.arange(BLOCK)
    hidden = model.forward(
        BlockRows(
            batch=rows_at(positions, slots),
            anchors_N=torch.full((BLOCK,), anchor),
            ends_N=torch.full((BLOCK,), anchor + BLOCK - 1),
        ),
        pool.layers,
    )
    base = model.base_logits(hidden)
    corrected, confidence = [], []
    state = None if model.markov is None else model.markov.initial_state(1)
    for k in range(BLOCK):
        before = ids[anchor + max(0, k - model.first_slot)][None]
        previous, logits = None, base[k]
        if model.markov is not None:
            assert state is not None
            step = model.markov.step(before, hidden[k : k + 1], state)
            state, previous = step.state_BM, step.previous_BM
            logits = logits + model.markov.bias(step.features_BM)[0]
        corrected.append(model.select(logits[None], before, hidden[k : k + 1])[0])
        if model.confidence is not None:
            confidence.append(model.confidence.logits(hidden[k : k + 1], previous)[0])
    return {
        "base": base,
        "corrected": torch.stack(corrected),
        "confidence": torch.stack(confidence) if confidence else None,
    }


def assert_equal_to(library: Library, draft: Path, target: Path) -> dict[str, Any]:
    model = model_of(draft, target)
    theirs = library.blocks(draft, ANCHORS)
    for index, anchor in enumerate(ANCHORS):
        for name, found in ours(model, anchor).items():
            if found is None:
                assert theirs[name] is None
                continue
            # float32 on both sides, sums in another order.
            torch.testing.assert_close(
                found,
                torch.tensor(theirs[name][index]),
                atol=3e-5,
                rtol=1e-4,
                msg=f"{name} of the block at {anchor}",
            )
    return theirs


@pytest.fixture
def target(checkpoints: Path) -> Path:
    return checkpoints / "hf-llama-tiny"


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_librarys(
    library: Library, checkpoints: Path, target: Path, tmp_path: Path, name: str
) -> None:
    draft = draft_at(checkpoints / name, target, tmp_path / "draft")
    theirs = assert_equal_to(library, draft, target)
    is_plain = "dflash-" in name or "no-markov" in name
    assert (theirs["base"] == theirs["corrected"]) is is_plain


@pytest.mark.parametrize("name", ["speculators-dspark-gated", "speculators-dspark-rnn"])
def test_the_other_anchor_moves_the_heads_by_a_slot(
    library: Library, checkpoints: Path, target: Path, tmp_path: Path, name: str
) -> None:
    draft = draft_at(checkpoints / name, target, tmp_path / "draft", sample_from_anchor=False)
    assert_equal_to(library, draft, target)


@pytest.mark.parametrize("is_open", [False, True])
def test_windows_count_from_the_anchor(
    library: Library, checkpoints: Path, target: Path, tmp_path: Path, is_open: bool
) -> None:
    draft = draft_at(
        checkpoints / "speculators-dspark-gated",
        target,
        tmp_path / "draft",
        layers=SLIDING,
        sliding_window_non_causal=is_open,
    )
    model = model_of(draft, target)
    assert [layer.is_causal for layer in model.layers] == [not is_open, False]
    assert_equal_to(library, draft, target)
