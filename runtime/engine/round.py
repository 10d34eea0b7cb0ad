"""One round: propose, one target forward over verify and prefill rows, verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from runtime.engine.prepare import PackedRound, no_drafts, pack_round
from runtime.engine.scheduler import Plan
from runtime.kv import KVLayer
from runtime.models import TargetModel
from runtime.spec.forced import ForcedLengths
from runtime.spec.types import Proposer, RoundResult
from runtime.spec.verify import verify


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """A round before its tokens are committed.

    Args:
        packed: its rows.
        result: per yielding request, the tokens it may commit.
        aux_hidden_NA: captured target states of all rows, None when none were asked for.
        final_hidden_ND: final-normed target states of all rows, None unless asked for.
    """

    packed: PackedRound
    result: RoundResult
    aux_hidden_NA: torch.Tensor | None
    final_hidden_ND: torch.Tensor | None


def run_round(
    plan: Plan,
    *,
    target: TargetModel,
    proposer: Proposer,
    target_kv: Sequence[KVLayer],
    kv_block_size: int,
    forced: ForcedLengths | None = None,
) -> Round:
    """Run the work of a plan; no request changes.

    `forced` decides in the target's place how many drafts are committed (benchmarks only).

    Sync: one, in verify (two when a request has penalties).
    """
    views = tuple(work.request.view(work.num_drafts) for work in plan.decodes)
    if any(view.num_drafts for view in views):
        proposal = proposer.propose(views)
    else:
        proposal = no_drafts(len(views), target.device)
    packed = pack_round(plan, proposal, kv_block_size=kv_block_size)
    output = target.forward(packed.batch, target_kv, proposer.aux_layer_ids)
    decide = verify if forced is None else forced.verify
    result = decide(target, output.hidden_ND, packed.rows, packed.proposal)
    return Round(
        packed=packed,
        result=_capped(result, [work.max_accepted for work in plan.decodes]),
        aux_hidden_NA=output.aux_hidden_NA,
        final_hidden_ND=output.hidden_ND if proposer.needs_final_hidden else None,
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
