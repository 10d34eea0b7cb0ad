"""From a plan to the rows of one target forward, and from a finished round to what became final.

Legend: N packed rows, B requests of the plan, Y requests whose rows yield a token, G drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.batch import PreparedBatch, on_device
from runtime.engine.request import Request
from runtime.engine.scheduler import Plan
from runtime.spec.packing import Place, pack_block_tables, pack_places, row_tiles
from runtime.spec.types import Observation, Proposal
from runtime.spec.verify import VerifyRows


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSpan:
    """Consecutive rows of one request.

    Args:
        first_row: index of the first one in the batch.
        start: its absolute position; the others follow.
        num_rows: how many.
    """

    request: Request
    first_row: int
    start: int
    num_rows: int

    @property
    def num_final_rows(self) -> int:
        """Rows, after the commit, whose next token is known: their KV and states are final."""
        return min(self.num_rows, len(self.request.ids_target) - 1 - self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """Whose rows one step has.

    Args:
        spans: per request of the plan, in order.
        yielding: the requests that yield a token: decodes, then last prefill chunks.
        decoding: the leading ones among them that ran a round.
    """

    spans: tuple[RowSpan, ...]
    yielding: tuple[Request, ...]
    decoding: tuple[Request, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the target forward, without padding."""
        return sum(span.num_rows for span in self.spans)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRound(StepRows):
    """The rows of one step, packed for the eager path.

    Args:
        batch: input of the target forward.
        rows: rows of the requests that yield a token.
        proposal: their drafts; a prefill has none.
    """

    batch: PreparedBatch
    rows: VerifyRows
    proposal: Proposal


def no_drafts(num_requests: int, device: torch.device) -> Proposal:
    """Return the proposal of a round without drafts."""
    return Proposal(
        ids_target_BG=torch.zeros((num_requests, 0), dtype=torch.int64, device=device),
        num_drafts=(0,) * num_requests,
    )


def pack_round(plan: Plan, proposal: Proposal, *, kv_block_size: int) -> PackedRound:
    """Lay out the rows of a step: decodes (newest token, then drafts), then prefill chunks.

    Args:
        plan: the work.
        proposal: drafts of `plan.decodes`, in order; their device is the batch's.
        kv_block_size: tokens of a KV block.
    """
    spans = _spans(plan, proposal)
    requests = tuple(span.request for span in spans)
    views = tuple(
        request.view(proposal.num_drafts[i] if i < len(plan.decodes) else 0)
        for i, request in enumerate(requests)
    )
    device = proposal.ids_target_BG.device
    places = [
        Place(index, position)
        for index, span in enumerate(spans)
        for position in range(span.start, span.start + span.num_rows)
    ]
    batch = pack_places(
        places,
        views,
        ids_target_N=_row_ids(spans, proposal),
        block_tables_BT=pack_block_tables(views, device=device),
        kv_block_size=kv_block_size,
    )
    num_decodes = len(plan.decodes)
    last_chunks = [num_decodes + i for i, work in enumerate(plan.prefills) if work.is_last]
    yielding = (*range(num_decodes), *last_chunks)
    first_rows = (
        *(span.first_row for span in spans[:num_decodes]),
        *(spans[i].first_row + spans[i].num_rows - 1 for i in last_chunks),
    )
    return PackedRound(
        batch=batch,
        spans=spans,
        rows=VerifyRows(views=tuple(views[i] for i in yielding), first_row=first_rows),
        yielding=tuple(requests[i] for i in yielding),
        decoding=requests[:num_decodes],
        proposal=_with_prefills(proposal, len(last_chunks)),
    )


def observation_of(
    packed: PackedRound,
    aux_hidden_NA: torch.Tensor | None,
    final_hidden_ND: torch.Tensor | None = None,
) -> Observation:
    """Return what a committed round made final: prefill rows and kept rows of a verify.

    Args:
        packed: the round, its tokens already committed to the requests.
        aux_hidden_NA: captured target states of all its rows.
        final_hidden_ND: their final-normed states.
    """
    rows: list[int] = []
    requests: list[int] = []
    next_ids: list[int] = []
    last_row: list[int] = []
    end = 0
    for place, span in enumerate(packed.spans):
        num_rows = span.num_final_rows
        rows.extend(range(span.first_row, span.first_row + num_rows))
        requests.extend([place] * num_rows)
        next_ids.extend(span.request.ids_target[span.start + 1 : span.start + 1 + num_rows])
        end_position = span.start + num_rows
        is_newest = end_position == len(span.request.ids_target) - 1
        # A prompt with one token left to prefill has the same lengths, but no round starts there.
        is_newest &= end_position >= span.request.placed.num_prefill_tokens
        last_row.append(len(rows) - 1 if is_newest and num_rows else -1)
        end = max(end, end_position)
    device = packed.batch.ids_target_N.device
    batch, index = packed.batch, None
    if len(rows) < batch.num_rows:
        index = on_device(rows, device=device)
        batch = _select_rows(batch, index, row_tiles(requests), end)
    return Observation(
        batch=batch,
        next_ids_target_N=on_device(next_ids, device=device),
        aux_hidden_N=_rows(aux_hidden_NA, index),
        views=tuple(span.request.view(0) for span in packed.spans),
        last_row=tuple(last_row),
        final_hidden_NH=_rows(final_hidden_ND, index),
    )


def _spans(plan: Plan, proposal: Proposal) -> tuple[RowSpan, ...]:
    extents = [
        (work.request, len(work.request.ids_target) - 1, num_drafts + 1)
        for work, num_drafts in zip(plan.decodes, proposal.num_drafts, strict=True)
    ]
    extents += [(work.request, work.start, work.num_rows) for work in plan.prefills]
    spans: list[RowSpan] = []
    first_row = 0
    for request, start, num_rows in extents:
        spans.append(RowSpan(request=request, first_row=first_row, start=start, num_rows=num_rows))
        first_row += num_rows
    return tuple(spans)


def _row_ids(spans: Sequence[RowSpan], proposal: Proposal) -> torch.Tensor:
    """Return int64 target ids [N]: known tokens from the host, drafts copied on the device."""
    known: list[int] = []
    draft_rows: list[int] = []
    draft_cells: list[tuple[int, int]] = []
    for index, span in enumerate(spans):
        tokens = span.request.ids_target[span.start : span.start + span.num_rows]
        known.extend(tokens)
        for offset in range(len(tokens), span.num_rows):  # beyond the newest token: drafts
            known.append(0)
            draft_rows.append(span.first_row + offset)
            draft_cells.append((index, offset - 1))
    device = proposal.ids_target_BG.device
    ids_target_N = on_device(known, device=device)
    if draft_rows:
        cells = on_device(draft_cells, device=device)
        drafts_target = proposal.ids_target_BG[cells[:, 0], cells[:, 1]]
        ids_target_N[on_device(draft_rows, device=device)] = drafts_target
    return ids_target_N


def _with_prefills(proposal: Proposal, num_prefills: int) -> Proposal:
    """Append requests without drafts."""
    if not num_prefills:
        return proposal
    drafts_BG = proposal.ids_target_BG
    return Proposal(
        ids_target_BG=torch.cat(
            [drafts_BG, drafts_BG.new_zeros((num_prefills, drafts_BG.shape[1]))]
        ),
        num_drafts=(*proposal.num_drafts, *(0,) * num_prefills),
        q=proposal.q,  # read by the rows of drafts only
    )


def _rows(states_NA: torch.Tensor | None, index: torch.Tensor | None) -> torch.Tensor | None:
    return states_NA if states_NA is None or index is None else states_NA[index]


def _select_rows(
    batch: PreparedBatch, index: torch.Tensor, tiles: list[tuple[int, int]], max_length: int
) -> PreparedBatch:
    return PreparedBatch(
        ids_target_N=batch.ids_target_N[index],
        positions_N=batch.positions_N[index],
        slots_N=batch.slots_N[index],
        row_request_N=batch.row_request_N[index],
        block_tables_BT=batch.block_tables_BT,
        max_length=max_length,
        tiles_U2=on_device(tiles, dtype=torch.int32, device=index.device).reshape(len(tiles), 2),
    )
