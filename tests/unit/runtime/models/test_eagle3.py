"""The EAGLE-3 draft against an independent dense reference, for every one of its switches."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from runtime.loading import LoadedModels
from runtime.models import DraftHidden, Eagle3Model
from tests import reference_eagle3 as reference
from tests.paged import Paged, Span
from tests.tiny import TOKENIZER_SIZE, VOCAB_SIZE, write_tiny_eagle3, write_tiny_target
from tests.tiny_manifest import load_tiny, tiny_manifest

TOLERANCE = 1e-4  # fp32 sums in another order; values up to about 15
LENGTH = 40

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm-before-residual": {"has_norm_before_residual": True},
    "norm-before-fc": {"has_norm_before_fc": True},
    "fc-norm": {"has_fc_norm": True},
    "norm-output": {"has_norm_output": True},
    "eagle-3.1": {"has_fc_norm": True, "has_norm_output": True, "has_norm_before_residual": True},
    "two-layers": {"num_layers": 2},
    "qwen3-layers": {"family": "qwen3", "num_layers": 2, "has_norm_before_residual": True},
    "own-embedding": {"has_own_embedding": True},
    "other-width": {"has_own_embedding": True, "hidden_size": 24},
    "identity-vocabulary": {"draft_vocab_size": None},
    "embedding-tap": {"boundary_ids": (0, 2, 3)},
    "two-taps": {"boundary_ids": (1, 4)},
    "biases": {"has_biases": True, "num_layers": 2},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A loaded draft beside its stored tensors, and one sequence of entries."""

    models: LoadedModels
    draft: Eagle3Model
    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    ids: torch.Tensor
    aux: torch.Tensor

    def expected(self, ids: torch.Tensor, states: torch.Tensor) -> reference.ReferenceOutput:
        embedding = self.tensors.get("embed_tokens.weight", self.models.target.embedding_VD)
        return reference.run(self.tensors, self.config, embedding=embedding, ids=ids, states=states)

    def paged(self) -> Paged:
        return Paged(self.draft.kv_specs, num_requests=1, max_length=2 * LENGTH)


def make_setup(tmp_path: Path, **options: Any) -> Setup:
    target_dir = write_tiny_target(tmp_path / "target")
    draft_dir = write_tiny_eagle3(tmp_path / "draft", target_dir, **options)
    models = load_tiny(tiny_manifest(target_dir, draft_dir))
    assert models.draft is not None
    stored = load_file(draft_dir / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    width = models.draft.facts.target_hidden_size * len(models.draft.facts.aux_layer_ids or ())
    return Setup(
        models=models,
        draft=models.draft,
        tensors={k: v.float() if v.is_floating_point() else v for k, v in stored.items()},
        config=json.loads((draft_dir / "config.json").read_text(encoding="utf-8")),
        ids=torch.randint(0, VOCAB_SIZE, (LENGTH,), generator=generator),
        aux=torch.randn(LENGTH, width, generator=generator) * 2,
    )


@pytest.mark.parametrize("case", CASES)
def test_rows_equal_the_reference(case: str, tmp_path: Path) -> None:
    setup = make_setup(tmp_path, **CASES[case])
    states = setup.draft.fuse(setup.aux)
    expected_states = reference.fuse(setup.tensors, setup.config, setup.aux)
    assert _difference(states, expected_states) < TOLERANCE
    expected = setup.expected(setup.ids, expected_states)
    paged = setup.paged()
    chunks = [
        setup.draft.forward(
            paged.batch([Span(request=0, start=start, ids=setup.ids[start:stop].tolist())]),
            states[start:stop],
            paged.pool.layers,
        )
        for start, stop in ((0, 17), (17, LENGTH))
    ]
    feedback = torch.cat([chunk.feedback_NH for chunk in chunks])
    head_input = torch.cat([chunk.head_input_NH for chunk in chunks])
    assert _difference(feedback, expected.feedback(setup.config)) < TOLERANCE
    logits = setup.draft.logits(head_input)  # rows above the tokenizer are no draft ids
    assert _difference(logits, expected.logits[:, : logits.shape[1]]) < TOLERANCE
    assert torch.equal(
        setup.draft.propose_ids(head_input),
        setup.draft.draft_to_target_R[logits.argmax(dim=1)],
    )


@pytest.mark.parametrize("has_norm_output", [False, True])
def test_chain_equals_the_reference(has_norm_output: bool, tmp_path: Path) -> None:
    setup = make_setup(tmp_path, has_norm_output=has_norm_output)
    states, ids, paged = setup.draft.fuse(setup.aux), setup.ids, setup.paged()
    expected_states = reference.fuse(setup.tensors, setup.config, setup.aux)
    hidden = setup.draft.forward(
        paged.batch([Span(request=0, start=0, ids=ids.tolist())]), states, paged.pool.layers
    )
    for step in range(4):
        expected = setup.expected(ids, expected_states)
        assert (
            _difference(setup.draft.logits(hidden.head_input_NH[-1:]), expected.logits[-1:])
            < TOLERANCE
        )
        token = setup.draft.propose_ids(hidden.head_input_NH[-1:])
        ids = torch.cat((ids, token))
        feedback = expected.feedback(setup.config)[-1:]
        expected_states = torch.cat((expected_states, feedback))
        batch = paged.batch([Span(request=0, start=LENGTH + step, ids=token.tolist())])
        hidden = setup.draft.forward(batch, hidden.feedback_NH[-1:], paged.pool.layers)


def test_norm_before_residual_changes_the_result(tmp_path: Path) -> None:
    plain = make_setup(tmp_path / "plain")
    other = make_setup(tmp_path / "other", has_norm_before_residual=True)
    assert _difference(_logits(plain), _logits(other)) > 0.1


def test_norm_before_fc_changes_the_result(tmp_path: Path) -> None:
    """C023: the same weights with the flag off give other logits."""
    setup = make_setup(tmp_path, has_norm_before_fc=True)
    fusion = setup.draft.fusion
    assert fusion.input_norm is not None
    bare = replace(setup.draft, fusion=replace(fusion, input_norm=None))
    without = replace(setup, draft=bare)
    assert _difference(_logits(setup), _logits(without)) > 0.1


def test_norm_output_changes_only_the_feedback(tmp_path: Path) -> None:
    setups = (
        make_setup(tmp_path / "raw"),
        make_setup(tmp_path / "normed", has_norm_output=True),
    )
    raw, normed = (_hidden(setup) for setup in setups)
    logits = [
        setup.draft.logits(hidden.head_input_NH)
        for setup, hidden in zip(setups, (raw, normed), strict=True)
    ]
    assert _difference(*logits) < TOLERANCE
    assert torch.equal(normed.feedback_NH, normed.head_input_NH)
    assert _difference(raw.feedback_NH, normed.feedback_NH) > 0.1


def test_reduced_map_is_absolute_and_identity_is_arange(tmp_path: Path) -> None:
    reduced = make_setup(tmp_path / "reduced").draft
    offsets = load_file(tmp_path / "reduced" / "draft" / "model.safetensors")["d2t"]
    assert torch.equal(reduced.draft_to_target_R, torch.arange(64) + offsets)
    identity = make_setup(tmp_path / "identity", draft_vocab_size=None).draft
    assert torch.equal(identity.draft_to_target_R, torch.arange(TOKENIZER_SIZE))


def test_shared_embedding_is_the_target_tensor(tmp_path: Path) -> None:
    setup = make_setup(tmp_path)
    assert setup.draft.embedding_VH is setup.models.target.embedding_VD


def test_rotary_table_reaches_every_target_position(tmp_path: Path) -> None:
    draft = make_setup(tmp_path, max_position_embeddings=64).draft
    assert draft.max_positions == 64
    assert draft.cos_sin_TP.shape[0] == 512


def _hidden(setup: Setup) -> DraftHidden:
    paged = setup.paged()
    batch = paged.batch([Span(request=0, start=0, ids=setup.ids.tolist())])
    return setup.draft.forward(batch, setup.draft.fuse(setup.aux), paged.pool.layers)


def _logits(setup: Setup) -> torch.Tensor:
    return setup.draft.logits(_hidden(setup).head_input_NH)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max())
