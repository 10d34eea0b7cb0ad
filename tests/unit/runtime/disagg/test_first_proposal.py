"""The first round at decode: which law the received drafts stand under, and that it changes no law.

C063: a PD decode whose first drafts have no distribution. The committed-token law is enumerated
from what the real path hands to the verifier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from runtime.disagg.frames import Prefilled, unpack_tensor
from runtime.disagg.handshake import FirstProposal
from runtime.engine.request import RequestInput
from runtime.kernels.rejection import RowDecisions, RowDrafts, probabilities, row_laws
from runtime.spec import verify
from runtime.spec.received import ReceivedDrafts, one_hot_law, propose_or_receive
from runtime.spec.types import RequestView, SamplingParams
from tests.engine_harness import World, prompt_of
from tests.fake_graph import make_agreeing_world
from tests.pd_harness import Pair, make_pair
from tests.tiny import VOCAB_SIZE
from tests.tiny_last_state import last_state_world
from tests.tiny_manifest import CPU

SETTINGS = {"num_speculative_tokens": 4, "verification": "rejection"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """What one call of the verifier's draw was given."""

    log_p_MV: torch.Tensor
    drafts: RowDrafts


@pytest.fixture(scope="module", params=["eagle3", "mtp-layers"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("first")
    if request.param == "eagle3":
        return make_agreeing_world(folder)
    return last_state_world(folder, "mtp", num_layers=4)


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[Decided]:
    calls: list[Decided] = []
    twin = verify.decide_rows

    def noted(log_p_MV: torch.Tensor, drafts: RowDrafts, rows: Any) -> RowDecisions:
        calls.append(Decided(log_p_MV=log_p_MV.clone(), drafts=drafts))
        return twin(log_p_MV, drafts, rows)

    monkeypatch.setattr(verify, "decide_rows", noted)
    return calls


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for pair in made:
        pair.close()


def sampled(seed: int, *, max_tokens: int = 6) -> RequestInput:
    return RequestInput(
        request_id=f"s{seed}",
        prompt_ids_target=prompt_of(seed, 11),
        params=SamplingParams(temperature=0.8, top_p=0.95, seed=seed),
        max_tokens=max_tokens,
        ignore_eos=True,
    )


def pair_of(world: World, pairs: list[Pair], **settings: Any) -> Pair:
    assert world.manifest.draft is not None
    pairs.append(make_pair(world, proposer=world.manifest.draft.algorithm, **SETTINGS, **settings))
    return pairs[-1]


def answer_to(pair: Pair) -> Prefilled:
    answer = pair.wire.answered[-1]
    assert isinstance(answer, Prefilled)
    return answer


def committed_law(log_p_1V: torch.Tensor, draft: int, q_V: torch.Tensor) -> torch.Tensor:
    """Return the law of the token that follows the row when the draft is `draft`, [V]."""
    laws = row_laws(
        log_p_1V,
        RowDrafts(
            ids_target_M=torch.tensor([draft]),
            log_q_MR=q_V.log()[None],
            ids_target_R=torch.arange(q_V.shape[0]),
            is_known_M=torch.tensor([True]),
        ),
    )
    law_V = probabilities(laws.log_residual_MV.float())[0] * (1 - laws.accept_M[0])
    law_V[draft] += laws.accept_M[0]
    return law_V


@pytest.mark.parametrize("with_graphs", [False, True], ids=["eager", "after-device-rounds"])
@pytest.mark.parametrize("first_proposal", ["one_hot", "full"])
def test_c063_the_first_committed_token_has_the_target_s_law(
    world: World,
    pairs: list[Pair],
    decided: list[Decided],
    first_proposal: FirstProposal,
    with_graphs: bool,
) -> None:
    pair = pair_of(world, pairs, first_proposal=first_proposal, with_graphs=with_graphs)
    if with_graphs:  # another request leaves its laws in every buffer there is
        pair.run([sampled(7, max_tokens=30)])
        assert pair.decode.stats().num_device_rounds > 3
    decided.clear()
    pair.run([sampled(8)])
    first, answer = decided[0], answer_to(pair)
    count = len(answer.draft_ids_target)
    assert count == 4  # the whole chain
    assert first.drafts.ids_target_M.tolist() == list(answer.draft_ids_target)
    assert first.drafts.log_q_MR is not None
    assert first.drafts.log_q_MR.shape == (count, VOCAB_SIZE)  # as wide as the target's vocabulary
    assert first.drafts.log_q_MR.dtype == torch.float32
    assert first.drafts.is_known_M is not None
    assert first.drafts.is_known_M.all()
    p_V = probabilities(first.log_p_MV)[0]
    if first_proposal == "one_hot":
        assert answer.draft_probs is None  # zero bytes on the wire
        q_GV = one_hot_law(answer.draft_ids_target, VOCAB_SIZE, CPU)
        laws = [
            committed_law(first.log_p_MV[:1], draft, one_hot_law([draft], VOCAB_SIZE, CPU)[0])
            for draft in range(VOCAB_SIZE)
        ]
        assert all(torch.allclose(law_V, p_V, rtol=0, atol=1e-6) for law_V in laws)
    else:
        assert answer.draft_probs is not None
        q_GV = unpack_tensor(answer.draft_probs, CPU)
        assert not torch.equal(q_GV, one_hot_law(answer.draft_ids_target, VOCAB_SIZE, CPU))
        law_V = sum(
            (
                q_GV[0, draft].double() * committed_law(first.log_p_MV[:1], draft, q_GV[0])
                for draft in q_GV[0].nonzero().flatten().tolist()
            ),
            torch.zeros(VOCAB_SIZE, dtype=torch.float64),
        )
        assert torch.allclose(law_V, p_V, rtol=0, atol=1e-6)
    assert torch.equal(first.drafts.log_q_MR, q_GV.log())  # received, not left by another round


def test_a_stale_law_would_show(world: World, pairs: list[Pair], decided: list[Decided]) -> None:
    """The enumeration fails for a law that another request left."""
    pair = pair_of(world, pairs, first_proposal="full")
    pair.run([sampled(7)])
    stale = answer_to(pair).draft_probs
    decided.clear()
    pair.run([sampled(8)])
    fresh = answer_to(pair).draft_probs
    assert stale is not None
    assert fresh is not None
    q_V, stale_V = unpack_tensor(fresh, CPU)[0], unpack_tensor(stale, CPU)[0]
    log_p_1V = decided[0].log_p_MV[:1]
    law_V = torch.zeros(VOCAB_SIZE, dtype=torch.float64)
    for draft in q_V.nonzero().flatten().tolist():
        law_V += q_V[draft].double() * committed_law(log_p_1V, draft, stale_V)
    assert not torch.allclose(law_V, probabilities(log_p_1V)[0], rtol=0, atol=1e-3)


def test_outside_rejection_mode_there_are_no_received_drafts(
    world: World, pairs: list[Pair]
) -> None:
    pair = pair_of(world, pairs, first_proposal="full")
    pair.run([replace(sampled(9), params=SamplingParams())])  # greedy
    assert pair.wire.asked[-1].num_drafts == 0
    assert answer_to(pair).draft_ids_target == ()
    assert answer_to(pair).draft_probs is None


def view_of(slot: int, *, num_drafts: int, rejects: bool) -> RequestView:
    return RequestView(
        request_id=str(slot),
        slot=slot,
        ids_target=[1, 2, 3],
        num_prompt_tokens=2,
        params=SamplingParams(temperature=0.5, verification="rejection" if rejects else "seeded"),
        block_table=[1],
        num_drafts=num_drafts,
    )


class Nobody:
    """A proposer that must not be asked."""

    def propose(self, views: Any) -> Any:
        raise AssertionError(f"asked for {len(views)} proposals")


def test_received_chains_of_a_batch_are_one_proposal() -> None:
    """The multi-layer (batch, steps, vocabulary) chain, cut to what each round wants."""
    views = [
        view_of(slot, num_drafts=wanted, rejects=rejects)
        for slot, wanted, rejects in ((0, 3, True), (1, 2, True), (2, 3, False))
    ]
    received = [ReceivedDrafts(ids_target=ids, q_GV=None) for ids in ((5, 6, 7), (1, 2, 3), (4,))]
    proposal = propose_or_receive(
        Nobody(),  # type: ignore[arg-type]
        views,
        received,
        target_vocab_size=VOCAB_SIZE,
        device=CPU,
    )
    assert proposal.num_drafts == (3, 2, 1)
    assert proposal.ids_target_BG.tolist() == [[5, 6, 7], [1, 2, 0], [4, 0, 0]]
    assert proposal.q is not None
    assert proposal.q.log_q_BGR.shape == (3, 3, VOCAB_SIZE)
    assert proposal.q.is_known == (True, True, False)
    q_BGV = proposal.q.log_q_BGR.exp()
    assert torch.equal(q_BGV[0], one_hot_law((5, 6, 7), VOCAB_SIZE, CPU))
    assert torch.equal(q_BGV[1, :2], one_hot_law((1, 2), VOCAB_SIZE, CPU))
