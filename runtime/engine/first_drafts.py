"""Drafts of a first round that a prefill server makes, with their laws where these travel."""

from __future__ import annotations

from dataclasses import replace

from runtime.disagg.frames import PackTensor, TensorBytes
from runtime.disagg.handshake import FirstProposal
from runtime.engine.request import Request
from runtime.spec.types import Proposer


def first_drafts(
    proposer: Proposer,
    request: Request,
    num_drafts: int,
    *,
    max_model_len: int,
    target_vocab_size: int,
    first_proposal: FirstProposal,
    pack: PackTensor,
) -> tuple[tuple[int, ...], TensorBytes | None]:
    """Return the first round's drafts and their laws, where they are wanted.

    Args:
        proposer: has observed the whole prompt.
        request: parked, its first token among its tokens.
        num_drafts: that are wanted at most.
        max_model_len: of the engine.
        target_vocab_size: as wide as the laws are.
        first_proposal: `one_hot` sends no laws.
        pack: makes of the laws what a frame takes.
    """
    if not num_drafts:
        return (), None
    room = max_model_len - len(request.ids_target) - 1
    view = request.view(max(0, min(num_drafts, room)))
    count = proposer.max_drafts(view) if view.num_drafts else 0
    if not count:
        return (), None
    proposal = proposer.propose([replace(view, num_drafts=count)])
    ids = tuple(proposal.ids_target_BG[0, : proposal.num_drafts[0]].tolist())
    if first_proposal == "one_hot" or proposal.q is None:
        return ids, None
    law_GR = proposal.q.log_q_BGR[0, : len(ids)].softmax(dim=1)
    q_GV = law_GR.new_zeros((len(ids), target_vocab_size))
    q_GV.index_copy_(1, proposal.q.ids_target_R, law_GR)
    return ids, pack("draft_probs", q_GV)
