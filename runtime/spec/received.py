"""Drafts that another process made: the first round of a request that was prefilled elsewhere.

In rejection mode a draft must come with the law that it was drawn from, or count as certain. Laws
that were received are as wide as the target's vocabulary; without one the law is one-hot at the
received id: the draft then stays with probability p, and p without it makes room for another token.
No law is ever looked for where a round on the device may have left one.

Legend: B views, G drafts, R draft vocabulary, V target vocabulary.
*Source:* sgl-project/sglang, "Give a PD decode's first EAGLE draft step a proposal distribution".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.batch import on_device
from runtime.spec.host import pad_proposal
from runtime.spec.types import DraftLaw, Proposal, Proposer, RequestView


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReceivedDrafts:
    """Drafts of one request's first round.

    Args:
        ids_target: the drafts.
        q_GV: float32 [drafts, V], the probabilities that each was drawn with; None: one-hot.
    """

    ids_target: tuple[int, ...]
    q_GV: torch.Tensor | None


def one_hot_law(
    ids_target: Sequence[int], target_vocab_size: int, device: torch.device
) -> torch.Tensor:
    """Return float32 [G, V]: 1 at each id."""
    index_G = on_device(ids_target, device=device)
    return torch.nn.functional.one_hot(index_G, target_vocab_size).to(torch.float32)


def propose_or_receive(
    proposer: Proposer,
    views: Sequence[RequestView],
    received: Sequence[ReceivedDrafts | None],
    *,
    target_vocab_size: int,
    device: torch.device,
) -> Proposal:
    """Return the proposal of a round in which drafts of some requests were received.

    Args:
        proposer: makes the drafts of the others.
        views: all requests of the round.
        received: for each of them; more drafts than the view wants are left out.
        target_vocab_size: V.
        device: of the proposal.
    """
    if not any(received):
        return proposer.propose(views)
    own = [b for b, drafts in enumerate(received) if drafts is None]
    made = proposer.propose([views[b] for b in own]) if own else pad_proposal([], device=device)
    counts = [
        0 if drafts is None else min(view.num_drafts, len(drafts.ids_target))
        for view, drafts in zip(views, received, strict=True)
    ]
    for place, b in enumerate(own):
        counts[b] = made.num_drafts[place]
    depth = max(counts, default=0)
    ids_target_BG = torch.zeros((len(views), depth), dtype=torch.int64, device=device)
    if own:
        width = min(depth, made.ids_target_BG.shape[1])
        ids_target_BG[on_device(own, device=device), :width] = made.ids_target_BG[:, :width]
    for b, drafts in enumerate(received):
        if drafts is not None and counts[b]:
            ids = drafts.ids_target[: counts[b]]
            ids_target_BG[b, : counts[b]] = on_device(ids, device=device)
    law = None
    if any(view.params.is_rejection for view in views):
        law = _law(views, received, own, made.q, counts, target_vocab_size, device)
    return Proposal(ids_target_BG=ids_target_BG, num_drafts=tuple(counts), q=law)


def _law(
    views: Sequence[RequestView],
    received: Sequence[ReceivedDrafts | None],
    own: Sequence[int],
    made: DraftLaw | None,
    counts: Sequence[int],
    target_vocab_size: int,
    device: torch.device,
) -> DraftLaw:
    """Return the laws of all drafts over the target's vocabulary."""
    shape = (len(views), max(counts, default=0), target_vocab_size)
    log_q_BGV = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
    is_known = [False] * len(views)
    if made is not None:
        for place, b in enumerate(own):
            width = min(shape[1], made.log_q_BGR.shape[1])
            log_q_BGV[b, :width].index_copy_(1, made.ids_target_R, made.log_q_BGR[place, :width])
            is_known[b] = made.is_known[place]
    for b, drafts in enumerate(received):
        if drafts is None or not counts[b]:
            continue
        q_GV = drafts.q_GV
        if q_GV is None:
            q_GV = one_hot_law(drafts.ids_target, target_vocab_size, device)
        log_q_BGV[b, : counts[b]] = q_GV[: counts[b]].to(device).log()
        is_known[b] = views[b].params.is_rejection
    return DraftLaw(
        log_q_BGR=log_q_BGV,
        ids_target_R=torch.arange(target_vocab_size, device=device),
        is_known=tuple(is_known),
    )
