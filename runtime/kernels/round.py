"""The ends of a round on the device: what its rows are made of, and what it leaves behind.

Integers only, so that kernel and twin agree exactly.

Legend: S slots, the last one for padding; T blocks of the round's longest request; B requests;
W rows of each; X = 1 + the most rows of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kernels.accept import accept_twin


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundRows:
    """The requests of a round, copied from their slots, and the places of their rows.

    Args:
        lengths_B: int64.
        newest_ids_target_B: int64.
        block_tables_BT: int32.
        positions_BW: int64, lengths_B + 0..W - 1.
        kv_slots_BW: int64, flat KV slots of these positions.
        positions_WB: int64, `positions_BW` place by place: rows of one place lie together.
        kv_slots_WB: int64, `kv_slots_BW` place by place.
        ids_target_BW: int64, the newest id; room for the drafts behind it, which hold anything.
    """

    lengths_B: torch.Tensor
    newest_ids_target_B: torch.Tensor
    block_tables_BT: torch.Tensor
    positions_BW: torch.Tensor
    kv_slots_BW: torch.Tensor
    positions_WB: torch.Tensor
    kv_slots_WB: torch.Tensor
    ids_target_BW: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundEnd:
    """What a round decided.

    Args:
        num_accepted_B: int64, accepted drafts.
        last_rows_B: int64, verified row of each request's newest final position.
    """

    num_accepted_B: torch.Tensor
    last_rows_B: torch.Tensor


def prepare_round(
    slots_B: torch.Tensor,
    lengths_S: torch.Tensor,
    newest_ids_target_S: torch.Tensor,
    block_tables_ST: torch.Tensor,
    *,
    num_blocks: int,
    width: int,
    kv_block_size: int,
) -> RoundRows:
    """Copy the requests of a round from their slots and place their rows.

    Args:
        slots_B: int64, contiguous.
        lengths_S: int64.
        newest_ids_target_S: int64.
        block_tables_ST: int32, at least `num_blocks` wide.
        num_blocks: T.
        width: W; positions lie in the first T blocks.
        kv_block_size: tokens of a block.

    Exactness: integers.
    Graph-safe: yes (CUDA).
    """
    if slots_B.is_cuda:
        from runtime.kernels.cuda.round import launch_prepare_round

        return launch_prepare_round(
            slots_B, lengths_S, newest_ids_target_S, block_tables_ST,
            num_blocks=num_blocks, width=width, kv_block_size=kv_block_size,
        )  # fmt: skip
    return prepare_round_twin(
        slots_B, lengths_S, newest_ids_target_S, block_tables_ST,
        num_blocks=num_blocks, width=width, kv_block_size=kv_block_size,
    )  # fmt: skip


def finish_round(
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    drafts_BG: torch.Tensor,
    chosen_BW: torch.Tensor,
    num_drafts_B: torch.Tensor,
    first_rows_B: torch.Tensor,
    *,
    num_rows: int,
    lengths_S: torch.Tensor,
    newest_ids_target_S: torch.Tensor,
    output_BX: torch.Tensor,
) -> RoundEnd:
    """Compare drafts with the target's choices, advance the slots and write the outcome.

    Args:
        slots_B: int64, contiguous; the last slot is padding and stays 0.
        lengths_B: int64, before the round.
        drafts_BG: int64 target ids; G may be 0.
        chosen_BW: int64 target ids chosen at the row of the newest token and of each draft.
        num_drafts_B: int64, drafts that count; see `runtime.kernels.accept`.
        first_rows_B: int64, verified row of each request's newest token.
        num_rows: N; rows of padding requests, which may lie behind them, are cut to the last one.
        lengths_S: int64, written.
        newest_ids_target_S: int64, written.
        output_BX: int64, written: accepted drafts, then the choices; the rest stays.

    Exactness: integers.
    Graph-safe: yes (CUDA).
    """
    assert chosen_BW.shape == (drafts_BG.shape[0], drafts_BG.shape[1] + 1), "W is G + 1"
    if slots_B.is_cuda:
        from runtime.kernels.cuda.round import launch_finish_round as finish
    else:
        finish = finish_round_twin
    return finish(
        slots_B, lengths_B, drafts_BG, chosen_BW, num_drafts_B, first_rows_B, num_rows=num_rows,
        lengths_S=lengths_S, newest_ids_target_S=newest_ids_target_S, output_BX=output_BX,
    )  # fmt: skip


def prepare_round_twin(
    slots_B: torch.Tensor,
    lengths_S: torch.Tensor,
    newest_ids_target_S: torch.Tensor,
    block_tables_ST: torch.Tensor,
    *,
    num_blocks: int,
    width: int,
    kv_block_size: int,
) -> RoundRows:
    """Compute `prepare_round` with torch."""
    lengths_B = lengths_S.index_select(0, slots_B)
    block_tables_BT = block_tables_ST[:, :num_blocks].index_select(0, slots_B)
    positions_BW = lengths_B[:, None] + torch.arange(width, device=slots_B.device)
    blocks_BW = block_tables_BT.gather(1, positions_BW // kv_block_size)
    kv_slots_BW = blocks_BW * kv_block_size + positions_BW % kv_block_size
    newest_B = newest_ids_target_S.index_select(0, slots_B)
    return RoundRows(
        lengths_B=lengths_B,
        newest_ids_target_B=newest_B,
        block_tables_BT=block_tables_BT,
        positions_BW=positions_BW,
        kv_slots_BW=kv_slots_BW,
        positions_WB=torch.stack(positions_BW.unbind(1)),
        kv_slots_WB=torch.stack(kv_slots_BW.unbind(1)),
        ids_target_BW=newest_B[:, None].repeat(1, width),
    )


def finish_round_twin(
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    drafts_BG: torch.Tensor,
    chosen_BW: torch.Tensor,
    num_drafts_B: torch.Tensor,
    first_rows_B: torch.Tensor,
    *,
    num_rows: int,
    lengths_S: torch.Tensor,
    newest_ids_target_S: torch.Tensor,
    output_BX: torch.Tensor,
) -> RoundEnd:
    """Compute `finish_round` with torch."""
    num_requests, width = chosen_BW.shape
    num_accepted_B, _ = accept_twin(drafts_BG, chosen_BW, num_drafts_B)
    is_real_B = slots_B != lengths_S.shape[0] - 1
    newest_B = chosen_BW.gather(1, num_accepted_B[:, None])[:, 0]
    lengths_S.index_copy_(0, slots_B, (lengths_B + num_accepted_B + 1) * is_real_B)
    newest_ids_target_S.index_copy_(0, slots_B, newest_B * is_real_B)
    output_BX[:num_requests, 0].copy_(num_accepted_B)
    output_BX[:num_requests, 1 : width + 1].copy_(chosen_BW)
    return RoundEnd(
        num_accepted_B=num_accepted_B,
        last_rows_B=(first_rows_B + num_accepted_B).clamp(max=num_rows - 1),
    )
