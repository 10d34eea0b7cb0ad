"""The runtime computes what Speculators' own MTP class computes, at every step."""

from __future__ import annotations

from pathlib import Path

import torch

from runtime.kv import KVPool
from runtime.loading import load_models
from runtime.models import MtpModel
from runtime.spec.packing import pack_rows
from runtime.spec.types import RequestView, SamplingParams
from specctl.ops.emit_manifest import emit_manifest
from tests.third_party.library import Library
from tests.third_party.library_configs import VOCABULARY, config_of_type

ROWS = 128  # of the worker's fixed inputs


def worker_inputs(hidden_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids [N] and states [N, H] that `speculators_worker` gives an MTP model."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, VOCABULARY, (1, ROWS), generator=generator)
    return ids[0], torch.randn(1, ROWS, hidden_size, generator=generator)[0]


def steps_of(model: MtpModel, num_steps: int) -> list[torch.Tensor]:
    """Return each step's logits for known tokens, each step over keys of its own, as in training.

    Step k pairs the state of step k - 1 at p, or the target's, with the token at p + 1 + k.
    """
    ids, states = worker_inputs(model.facts.decoder.hidden_size)
    num_rows = ROWS - num_steps - 1
    view = RequestView(
        request_id="r",
        slot=0,
        ids_target=ids.tolist(),
        num_prompt_tokens=ROWS,
        params=SamplingParams(),
        block_table=(0,),
        num_drafts=0,
    )
    state, steps = states[:num_rows], []
    for step in range(num_steps):
        pool = KVPool(
            model.kv_specs, num_blocks=1, kv_block_size=ROWS, dtype=state.dtype, device=state.device
        )
        tokens = ids[step + 1 : step + 1 + num_rows].tolist()
        batch = pack_rows(
            [(0, position, token) for position, token in enumerate(tokens)],
            [view],
            kv_block_size=ROWS,
            device=state.device,
        )
        hidden = model.forward(batch, state, pool.layers)
        steps.append(model.logits(hidden.head_input_NH))
        state = hidden.feedback_NH
    return steps


def test_every_step_has_the_librarys_logits(
    library: Library, checkpoints: Path, tmp_path: Path
) -> None:
    target, saved = checkpoints / "hf-llama-clean", tmp_path / "saved"
    library.build(saved, config_of_type("mtp", target))
    manifest = emit_manifest(str(target), str(saved), manifest_dir=tmp_path)
    models = load_models(manifest, tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    draft = models.draft
    assert isinstance(draft, MtpModel)
    expected = library.trace(saved)["steps"]
    with torch.inference_mode():
        found = steps_of(draft, len(expected))
    assert len(expected) == manifest.geometry.num_speculative_tokens == 3
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(
            own.flatten()[: len(theirs)], torch.tensor(theirs), rtol=1e-4, atol=1e-5
        )
    assert not torch.allclose(found[0], found[1], atol=1e-2)
