"""How near the target's choice was at one position: evidence that a difference is a near-tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.kv import KVPool
from runtime.models import TargetModel
from runtime.spec.packing import pack_rows
from runtime.spec.types import RequestView, SamplingParams

_ROWS_PER_STEP = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class TopTwo:
    """The two likeliest target ids and the difference of their fp32 logits."""

    top1_id: int
    top2_id: int
    margin: float


@torch.inference_mode()
def top_two_after(target: TargetModel, ids_target: Sequence[int], kv_block_size: int) -> TopTwo:
    """Return the target's two likeliest next tokens after `ids_target`.

    The tokens run through the served model's own forward, with a KV pool of their own.
    """
    num_blocks = -(-len(ids_target) // kv_block_size)
    pool = KVPool(
        target.kv_specs,
        num_blocks=num_blocks,
        kv_block_size=kv_block_size,
        dtype=target.dtype,
        device=target.device,
    )
    view = RequestView(
        request_id="margin",
        slot=0,
        ids_target=ids_target,
        num_prompt_tokens=len(ids_target),
        params=SamplingParams(),
        block_table=range(num_blocks),
        num_drafts=0,
    )
    hidden = None
    for start in range(0, len(ids_target), _ROWS_PER_STEP):
        chunk = ids_target[start : start + _ROWS_PER_STEP]
        rows = [(0, start + offset, token) for offset, token in enumerate(chunk)]
        batch = pack_rows(rows, (view,), kv_block_size=kv_block_size, device=target.device)
        hidden = target.forward(batch, pool.layers).hidden_ND[-1:]
    assert hidden is not None, "there is no token to predict from"
    # A stable sort, as the target breaks a tie: the lowest id first. topk promises no order.
    values, ids = torch.sort(target.logits(hidden)[0], descending=True, stable=True)
    top1, top2 = values[:2].tolist()
    top1_id, top2_id = ids[:2].tolist()
    return TopTwo(top1_id=top1_id, top2_id=top2_id, margin=top1 - top2)
