"""One round in two halves: propose and send the rows of a target forward off; wait and verify.

Between the halves other rounds over other requests may be under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from runtime.engine.forwards import Forwards, RowsDone
from runtime.engine.prepare import (
    PackedRound,
    RowSpan,
    StepRows,
    no_drafts,
    observation_of,
    pack_round,
)
from runtime.engine.request import Placement
from runtime.engine.scheduler import Plan
from runtime.kv import KVLayer
from runtime.models import TargetModel
from runtime.parallel.messages import SlotNews
from runtime.spec.forced import ForcedLengths
from runtime.spec.masks import allowed_rows
from runtime.spec.received import propose_or_receive
from runtime.spec.types import PrefillProposer, Proposer, RoundResult
from runtime.spec.verify import VerifyRows, verify


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """A round before its tokens are committed.

    Args:
        rows: its rows.
        result: per yielding request, the tokens it may commit.
        aux_hidden_NA: captured target states of all rows, None when none were asked for.
        final_hidden_ND: final-normed target states of all rows, None unless asked for.
        draft: took the states of a prefill in on the device, so there are none here; None: the
            proposer has not seen them.
    """

    rows: StepRows
    result: RoundResult
    aux_hidden_NA: torch.Tensor | None = None
    final_hidden_ND: torch.Tensor | None = None
    draft: PrefillProposer | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedRound:
    """A round whose forward is under way.

    Args:
        plan: its work.
        rows: its rows; packed ones unless the device has them in a state of its own.
        placements: what each request of the plan held; another one now means that it left.
    """

    plan: Plan
    rows: StepRows
    placements: tuple[Placement, ...]


def start_round(
    plan: Plan,
    *,
    forwards: Forwards,
    proposer: Proposer,
    target_kv: Sequence[KVLayer],
    kv_block_size: int,
    target_vocab_size: int,
    device: torch.device,
    on_sent_off: Callable[[Sequence[SlotNews]], None] | None = None,
) -> StartedRound:
    """Draft for the work of a plan and send its rows off; no request changes.

    `on_sent_off` is told of the rows just before.

    Sync: none.
    """
    views = tuple(work.request.view(work.num_drafts) for work in plan.decodes)
    if any(view.num_drafts for view in views):
        proposal = propose_or_receive(
            proposer,
            views,
            [work.request.placed.received for work in plan.decodes],
            target_vocab_size=target_vocab_size,
            device=device,
        )
    else:
        proposal = no_drafts(len(views), device)
    packed = pack_round(plan, proposal, kv_block_size=kv_block_size)
    news = [_news(span) for span in packed.spans]
    if on_sent_off is not None:
        on_sent_off(news)
    forwards.submit(packed.batch, target_kv, proposer.aux_layer_ids, news)
    return under_way(plan, packed)


def under_way(plan: Plan, rows: StepRows) -> StartedRound:
    """Note in the requests of a plan that their rows were sent off."""
    placements = tuple(request.placed for request in plan.requests)
    for placed in placements:
        placed.is_under_way = True
        placed.num_final_rows = 0
    return StartedRound(plan=plan, rows=rows, placements=placements)


def finish_round(
    started: StartedRound,
    *,
    forwards: Forwards,
    target: TargetModel,
    proposer: Proposer,
    forced: ForcedLengths | None = None,
    on_rows: RowsDone | None = None,
) -> Round:
    """Wait for a round's forward and decide about its drafts; no request changes.

    `forced` decides in the target's place how many drafts are committed (benchmarks only);
    `on_rows` is told of every layer whose keys and values of these rows were launched.

    Sync: one, in verify; one more each when a request has penalties and when one has a grammar.
    """
    for placed in started.placements:
        placed.is_under_way = False
    packed = started.rows
    assert isinstance(packed, PackedRound), "rows of this path are packed"
    output = forwards.collect(on_rows)
    decide = verify if forced is None else forced.verify
    # Here, not before the forward: the host makes masks while the device computes.
    rows = masked_rows(packed, target.facts.vocab_size)
    result = decide(target, output.hidden_ND, rows, packed.proposal)
    return Round(
        rows=packed,
        result=_capped(result, [work.max_accepted for work in started.plan.decodes]),
        aux_hidden_NA=output.aux_hidden_NA,
        final_hidden_ND=(
            target.final_states(output.hidden_ND) if proposer.needs_final_hidden else None
        ),
    )


def tell_proposer(proposer: Proposer, done: Round) -> None:
    """Tell who drafts what a committed round made final."""
    if done.draft is not None:
        done.draft.note_prefill([request.view(0) for request in done.rows.yielding])
        return
    assert isinstance(done.rows, PackedRound), "rows of the eager path are packed"
    proposer.observe(observation_of(done.rows, done.aux_hidden_NA, done.final_hidden_ND))


def masked_rows(packed: PackedRound, num_ids: int) -> VerifyRows:
    """Return the rows of a round with the masks of the requests that have a grammar.

    Sync: one if there are such requests: their drafts are read.
    """
    if all(request.masks is None for request in packed.yielding):
        return packed.rows
    device = packed.batch.ids_target_N.device
    drafts = packed.proposal.ids_target_BG.tolist()
    allowed: list[torch.Tensor | None] = []
    for request, row, count in zip(
        packed.yielding, drafts, packed.proposal.num_drafts, strict=True
    ):
        wish = request.mask_wish(row[:count])
        allowed.append(None if wish is None else allowed_rows(wish, num_ids, device))
    return replace(packed.rows, allowed=tuple(allowed))


def _news(span: RowSpan) -> SlotNews:
    placed = span.request.placed
    return SlotNews(
        slot=placed.slot,
        start=span.start,
        num_rows=span.num_rows,
        num_final_rows=placed.num_final_rows,
    )


def _capped(result: RoundResult, caps: Sequence[int]) -> RoundResult:
    """Accept no more drafts than the caps say; what a draft at a cap equals is the target's token.

    Args:
        result: its first entries are those of the caps; the others have no drafts.
        caps: drafts that count, per decoding request.
    """
    if all(count <= cap for count, cap in zip(result.num_drafts, caps, strict=False)):
        return result
    limits = (*caps, *(0,) * (len(result.num_drafts) - len(caps)))
    return replace(
        result,
        committed=tuple(
            ids[: limit + 1] for ids, limit in zip(result.committed, limits, strict=True)
        ),
        num_drafts=tuple(map(min, result.num_drafts, limits)),
        num_accepted_drafts=tuple(map(min, result.num_accepted_drafts, limits)),
    )
