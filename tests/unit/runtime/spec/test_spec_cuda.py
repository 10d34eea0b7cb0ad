"""On CUDA: the CPU's noise and choices bit for bit, and one wait for the device in a round."""

from __future__ import annotations

import warnings

import pytest
import torch

from runtime.spec.noise import NoiseKey
from runtime.spec.types import Proposal, SamplingParams
from runtime.spec.verify import VerifyRows, verify
from tests.unit.runtime.spec.stub_model import IdentityHead, gumbel_rows, make_view

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
KINDS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.9, top_k=500, top_p=0.9, min_p=1e-4, seed=5),
    "penalised": SamplingParams(presence_penalty=0.5, logit_bias=((3, 1.0),), min_tokens=9),
}


def test_noise_has_the_bits_of_the_cpu() -> None:
    keys = [NoiseKey(seed=2**63 + m, choice_index=m % 2, position=m * 31) for m in range(9)]
    made = gumbel_rows(keys, num_ids=49_152, device=torch.device("cuda"))
    assert torch.equal(made.cpu(), gumbel_rows(keys, num_ids=49_152))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_round_chooses_alike_and_waits_once(kind: str) -> None:
    num_requests, num_drafts, num_ids = 6, 4, 49_152
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(num_requests * (num_drafts + 1), num_ids, generator=generator) * 3
    views = tuple(
        make_view(range(10, 14 + i), KINDS[kind], num_prompt_tokens=3) for i in range(num_requests)
    )
    rows = VerifyRows(
        views=views, first_row=tuple(i * (num_drafts + 1) for i in range(num_requests))
    )
    drafts = torch.randint(0, num_ids, (num_requests, num_drafts), generator=generator)
    results = {}
    for device in ("cpu", "cuda"):
        hidden = logits.to(device)
        proposal = Proposal(
            ids_target_BG=drafts.to(device), num_drafts=(num_drafts,) * num_requests
        )
        verify(IdentityHead(), hidden, rows, proposal)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            results[device] = verify(IdentityHead(), hidden, rows, proposal)
            torch.cuda.set_sync_debug_mode("default")
        # torch also warns once that the debug mode is a prototype; that is no wait.
        waits = [w for w in caught if "called a synchronizing" in str(w.message)]
        expected = 2 if kind == "penalised" else 1
        assert len(waits) == (expected if device == "cuda" else 0)
    assert results["cpu"] == results["cuda"]
