"""The ends of a round on the device: what its rows are made of, and what it leaves behind.

Integers only, so that kernel and twin agree exactly.

Legend: S slots, the last one for padding; T blocks of the round's longest request; B requests;
W rows of each; X = 1 + the most rows of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundRows:
    """The requests of a round, copied from their slots, and the places of their rows.

    Args:
        lengths_B: int64.
        newest_ids_target_B: int64.
        block_tables_BT: int32.
        positions_BW: int64, lengths_B + 0..W - 1.
        kv_slots_BW: int64, flat KV slots of these positions.
    """

    lengths_B: torch.Tensor
    newest_ids_target_B: torch.Tensor
    block_tables_BT: torch.Tensor
    positions_BW: torch.Tensor
    kv_slots_BW: torch.Tensor


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


def commit_round(
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    chosen_BW: torch.Tensor,
    num_accepted_B: torch.Tensor,
    *,
    lengths_S: torch.Tensor,
    newest_ids_target_S: torch.Tensor,
    output_BX: torch.Tensor,
) -> None:
    """Advance the slots of a round by what it commits and write its outcome.

    Args:
        slots_B: int64, contiguous; the last slot is padding and stays 0.
        lengths_B: int64, before the round.
        chosen_BW: int64 target ids.
        num_accepted_B: int64, accepted drafts; the choices up to that row are committed.
        lengths_S: int64, written.
        newest_ids_target_S: int64, written.
        output_BX: int64, written: accepted drafts, then the choices; the rest stays.

    Exactness: integers.
    Graph-safe: yes (CUDA).
    """
    if slots_B.is_cuda:
        from runtime.kernels.cuda.round import launch_commit_round as commit
    else:
        commit = commit_round_twin
    commit(
        slots_B, lengths_B, chosen_BW, num_accepted_B,
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
    return RoundRows(
        lengths_B=lengths_B,
        newest_ids_target_B=newest_ids_target_S.index_select(0, slots_B),
        block_tables_BT=block_tables_BT,
        positions_BW=positions_BW,
        kv_slots_BW=blocks_BW * kv_block_size + positions_BW % kv_block_size,
    )


def commit_round_twin(
    slots_B: torch.Tensor,
    lengths_B: torch.Tensor,
    chosen_BW: torch.Tensor,
    num_accepted_B: torch.Tensor,
    *,
    lengths_S: torch.Tensor,
    newest_ids_target_S: torch.Tensor,
    output_BX: torch.Tensor,
) -> None:
    """Compute `commit_round` with torch."""
    num_requests, width = chosen_BW.shape
    is_real_B = slots_B != lengths_S.shape[0] - 1
    newest_B = chosen_BW.gather(1, num_accepted_B[:, None])[:, 0]
    lengths_S.index_copy_(0, slots_B, (lengths_B + num_accepted_B + 1) * is_real_B)
    newest_ids_target_S.index_copy_(0, slots_B, newest_B * is_real_B)
    output_BX[:num_requests, 0].copy_(num_accepted_B)
    output_BX[:num_requests, 1 : width + 1].copy_(chosen_BW)
