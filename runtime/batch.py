"""Frozen inputs of a forward pass, shared by models, proposers and the engine, and their upload.

Legend: N packed rows, B requests, T blocks in the longest block table, W rows of each request in a
round. A row is one token of one request at one absolute position; prefill, decode and verify rows
may share a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch

ROW_TILE_ROWS = 16
"""Most rows of a row tile."""


def on_device(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Return host numbers as a device tensor.

    Sync: none. `torch.tensor(..., device="cuda")` waits for the stream; this copy does not. Its
    pageable source is staged before the call returns, so it may be freed at once.
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedBatch:
    """Everything one forward reads besides weights and the KV pool.

    Args:
        ids_target_N: int64, target vocabulary.
        positions_N: int64, absolute position of the row in its request.
        slots_N: int64, flat KV slot (block * kv_block_size + offset) that the row writes.
        row_request_N: int32, row -> row of `block_tables_BT`.
        block_tables_BT: int32, block ids of each request in order; unused entries are 0.
        max_length: largest position + 1 that a row sees, over all rows (host value, sizes grids
            only).
        limits_N: int64, last position that a row attends to; None: its own. Rows of a block draft
            see the whole block.
        window_positions_N: int64, position that a sliding window of the row ends at; None: its own.
            Windows of a block draft end at the anchor for all rows of the block.
        rows_per_request: set when the batch is dense: request b of the tables has rows
            b * rows_per_request and on, this many, at consecutive positions. Kernels may then
            handle them together.
        tiles_U2: int32, of a batch that is not dense: (first row, number of rows) of groups of at
            most `ROW_TILE_ROWS` neighbours of one request. They cover all rows; None: rows alone.
        arrivals_X: int32 zeros that launches count in and leave at 0; None: they bring their own.
        spread: the rows of a packed round laid out densely, for backends that take no packed ones.

    Invariants: tensors are contiguous; a row attends to positions 0..its limit; rows of one request
    are in ascending order; all rows of a layer are written to the pool before that layer's
    attention reads it.
    """

    ids_target_N: torch.Tensor
    positions_N: torch.Tensor
    slots_N: torch.Tensor
    row_request_N: torch.Tensor
    block_tables_BT: torch.Tensor
    max_length: int
    limits_N: torch.Tensor | None = None
    window_positions_N: torch.Tensor | None = None
    rows_per_request: int | None = None
    spread: SpreadRows | None = None
    tiles_U2: torch.Tensor | None = None
    arrivals_X: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows in the batch."""
        return self.ids_target_N.shape[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpreadRows:
    """Packed rows of a round with gaps between them, so that every request has W rows.

    Args:
        batch: the dense rows; those beyond a request's own are ghosts: they write where the next
            round writes before it reads, and nobody reads what they yield.
        packed_rows_M: int64 [B * W], the packed row that a dense row takes its values from; of a
            ghost, any.
        dense_rows_N: int64, the dense row of a packed one; of a padding row, any.
    """

    batch: PreparedBatch
    packed_rows_M: torch.Tensor
    dense_rows_N: torch.Tensor


def packed(x_BC: torch.Tensor) -> torch.Tensor:
    """Return [B * C] in memory order; `flatten` alone may return a view with another stride."""
    return x_BC.flatten().contiguous()


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayout:
    """Where the rows of a ragged round are: each request has its drafts + 1, one after the other.

    Rows after the last request's are padding; so is every request without a row.

    Args:
        first_rows_B: int64, row of each request's newest token; below N even for padding.
        cells_N: int64, b * W + offset of a row in its request; 0 for padding rows.
        request_N: int32, index of the request; B for padding rows.
        is_padding_N: bool.
        rows_BW: int64, row of each cell; beyond a request's own cells any row below N.
    """

    first_rows_B: torch.Tensor
    cells_N: torch.Tensor
    request_N: torch.Tensor
    is_padding_N: torch.Tensor
    rows_BW: torch.Tensor


RoundKind = Literal["greedy", "sampled", "filtered", "rejection"]
"""How the tokens of a round are chosen: all greedy, some drawn, some drawn after filters, drafts
accepted with a chance."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundLaws:
    """Takes the laws that a round's drafts are drawn from, draft by draft.

    Its tensors belong to one run of a round, captured or not: none outlives it, so none is stale.

    Args:
        log_q: fp32 [B, R] log weights of each draft so far.
        maps: int64 [R], target id of each column, of each draft so far.
    """

    log_q: list[torch.Tensor] = field(default_factory=list)
    maps: list[torch.Tensor] = field(default_factory=list)

    def add(self, log_q_BR: torch.Tensor, ids_target_R: torch.Tensor) -> None:
        """Take the law of the next draft of every request."""
        self.log_q.append(log_q_BR)
        self.maps.append(ids_target_R)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundSampling:
    """How the requests of a round choose tokens, on the device: columns with a cell for each slot.

    Args:
        is_sampled_S: bool, False for greedy requests and padding.
        seed_low_S: int64, low 32 bits of the request's seed.
        seed_high_S: int64, high 32 bits.
        choice_index_S: int64, index among the choices of one request.
        temperature_S: fp32, 1 for greedy.
        top_k_S: int64; the vocabulary's size or more keeps all.
        log_min_p_S: fp32; -inf keeps all.
        top_p_S: fp64; 1 keeps all.
        slots_B: int64, contiguous, the cell of each request; None: cell b is that of request b.
        has_filters: whether filters are applied; False only where they would keep all (host value).
    """

    is_sampled_S: torch.Tensor
    seed_low_S: torch.Tensor
    seed_high_S: torch.Tensor
    choice_index_S: torch.Tensor
    temperature_S: torch.Tensor
    top_k_S: torch.Tensor
    log_min_p_S: torch.Tensor
    top_p_S: torch.Tensor
    slots_B: torch.Tensor | None
    has_filters: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRequests:
    """The requests of a round whose numbers the host does not know: it runs behind the device.

    Args:
        slots_B: int64, row of per-slot state; padding requests share the last slot.
        lengths_B: int64, positions whose KV is final, so the position of the newest token; 0 for
            padding.
        newest_ids_target_B: int64.
        num_drafts_B: int64, drafts that count, 0 for padding; rows beyond them are computed, too.
        block_tables_BT: int32, enough for every position below `max_length`; entries that a request
            does not hold are 0, and so are all of padding.
        positions_BW: int64, lengths_B + 0..W - 1.
        kv_slots_BW: int64, flat KV slots of these positions; in block 0 where a request holds none.
        positions_WB: int64, `positions_BW` place by place, for steps of one row a request.
        kv_slots_WB: int64, `kv_slots_BW` place by place.
        ids_target_BW: int64, the newest id, and behind it the room that drafts are written to.
        row_request_BW: int32, index of the request.
        row_request_B: int32, 0..B - 1.
        max_length: bound of every position + 1 in this round (host value).
        layout: of the rows to verify; None where every request has W of them. With a layout
            `block_tables_BT` has one row more, the padding rows'.
        sampling: how tokens are drawn; None where every request is greedy.
        laws: takes the laws of drafts in rejection mode, where those who draw them hand them over;
            drafts without count as certain. None in other modes.
        arrivals_X: as in `PreparedBatch`.
    """

    slots_B: torch.Tensor
    lengths_B: torch.Tensor
    newest_ids_target_B: torch.Tensor
    num_drafts_B: torch.Tensor
    block_tables_BT: torch.Tensor
    positions_BW: torch.Tensor
    kv_slots_BW: torch.Tensor
    positions_WB: torch.Tensor
    kv_slots_WB: torch.Tensor
    ids_target_BW: torch.Tensor
    row_request_BW: torch.Tensor
    row_request_B: torch.Tensor
    max_length: int
    layout: PackedLayout | None = None
    sampling: RoundSampling | None = None
    laws: RoundLaws | None = None
    arrivals_X: torch.Tensor | None = None

    @property
    def drafts_BG(self) -> torch.Tensor:  # noqa: N802 - an axis suffix
        """Where the drafts of the round are written; G = W - 1."""
        return self.ids_target_BW[:, 1:]

    def step(self, ids_target_B: torch.Tensor, *, place: int) -> PreparedBatch:
        """Return one row of each request.

        Args:
            ids_target_B: int64, contiguous.
            place: of the row, counted from the newest token, below W.

        Sync: none; the rows of a padding request write to block 0.
        """
        return PreparedBatch(
            ids_target_N=ids_target_B,
            positions_N=self.positions_WB[place],
            slots_N=self.kv_slots_WB[place],
            row_request_N=self.row_request_B,
            block_tables_BT=self.block_tables_BT,
            max_length=self.max_length,
            rows_per_request=1,
            arrivals_X=self.arrivals_X,
        )

    def batch(self, ids_target_BC: torch.Tensor) -> PreparedBatch:
        """Return C rows of each request from the newest token on, request by request.

        Args:
            ids_target_BC: int64; C is W at most.

        Sync: none; the rows of a padding request write to block 0.
        """
        count = ids_target_BC.shape[1]
        assert count <= self.positions_BW.shape[1], "a round has W positions"
        return PreparedBatch(
            ids_target_N=packed(ids_target_BC),
            positions_N=packed(self.positions_BW[:, :count]),
            slots_N=packed(self.kv_slots_BW[:, :count]),
            row_request_N=packed(self.row_request_BW[:, :count]),
            block_tables_BT=self.block_tables_BT,
            max_length=self.max_length,
            rows_per_request=count,
            arrivals_X=self.arrivals_X,
        )

    def verify_batch(self) -> PreparedBatch:
        """Return the rows that the target verifies: all W of each request, or the packed ones.

        Their ids are `ids_target_BW`, drafts written.

        Sync: none; padding rows write to block 0.
        """
        dense, layout = self.batch(self.ids_target_BW), self.layout
        if layout is None:
            return dense
        cells_N, is_padding_N = layout.cells_N, layout.is_padding_N
        return PreparedBatch(
            ids_target_N=dense.ids_target_N.index_select(0, cells_N),
            positions_N=dense.positions_N.index_select(0, cells_N).masked_fill(is_padding_N, 0),
            slots_N=dense.slots_N.index_select(0, cells_N).masked_fill(is_padding_N, 0),
            row_request_N=layout.request_N,
            block_tables_BT=self.block_tables_BT,
            max_length=self.max_length,
            spread=SpreadRows(
                batch=dense, packed_rows_M=packed(layout.rows_BW), dense_rows_N=cells_N
            ),
        )

    def per_request(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return [B, W] of a value per verified row; beyond a request's own rows anything.

        Sync: none.
        """
        if self.layout is None:
            return values_N.view(self.positions_BW.shape)
        return values_N[self.layout.rows_BW]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundStates:
    """What a verify forward yielded, before the host knows how many rows were accepted.

    Args:
        batch: the verified rows; the first `accepted + 1` of each request are final.
        next_ids_target_N: int64, the target's choice at each row: the token at the next position
            where the row is final.
        aux_hidden_NA: captured target states, None when none were asked for.
        final_hidden_ND: final-normed target states, None unless the draft needs them.
        last_rows_B: int64, row of each request's newest final position.
    """

    batch: PreparedBatch
    next_ids_target_N: torch.Tensor
    aux_hidden_NA: torch.Tensor | None
    final_hidden_ND: torch.Tensor | None
    last_rows_B: torch.Tensor


@runtime_checkable
class ConfidentDraft(Protocol):
    """A proposer that says how sure its newest drafts are.

    Attributes:
        confidence_SG: float32, chance of each draft of a slot's newest round, given those before;
            1 where unknown.
    """

    confidence_SG: torch.Tensor

    @property
    def has_confidence(self) -> bool:
        """Whether the draft has a head that computes them."""


class RoundDraft(Protocol):
    """The part of a proposer that runs inside a round without host reads (eager or captured).

    The rows of a request never depend on those of another; per-slot state has one row more than
    requests, for padding. Shapes follow from the arguments' shapes alone.
    """

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Target layers whose output `observe_round` needs."""

    @property
    def needs_final_hidden(self) -> bool:
        """Whether `observe_round` needs the target's final-normed states."""

    def draft_round(self, requests: RoundRequests) -> None:
        """Write target ids to `requests.drafts_BG`: the drafts that `propose` would make.

        Sync: none.
        """

    def observe_round(self, requests: RoundRequests, states: RoundStates) -> None:
        """Take the rows in as `observe` would; what rows beyond the final ones do is overwritten.

        Args:
            requests: as they stood before the round.
            states: of all rows.

        Sync: none.
        """


@runtime_checkable
class PrefillDraft(Protocol):
    """A draft that takes the rows of a prefill in on the device (eager or captured)."""

    def observe_prefill(self, slots_B: torch.Tensor, states: RoundStates) -> None:
        """Take the rows of prompts in as `observe` would.

        What `observe` keeps on the host is done apart, when the host knows the request's token.

        Args:
            slots_B: int64, the requests' slots; the padding slot where there is no prompt.
            states: of the rows; those of the last request are padding, whose keys and values go to
                block 0.

        Sync: none.
        """
