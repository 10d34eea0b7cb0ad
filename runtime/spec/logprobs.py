"""Log probabilities of committed tokens: the target's, of its raw logits.

They are those of the model before temperature, penalties, bias, masks and filters, as in vLLM's
default; so they say what the model thought, and are the same in both verification modes and without
a draft. The sum under the logarithm is an integer sum over fixed point, so a row's values have the
same bits in any batch.

Legend: M rows, V target ids, K reported ids.
"""

from __future__ import annotations

import torch

from runtime.kernels.exact import exact_log
from runtime.kernels.law import FIXED_POINT, comparable, masses
from runtime.spec.types import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""Reported for ids that the target gives no probability; JSON has no infinity."""


def log_probabilities(logits_MV: torch.Tensor) -> torch.Tensor:
    """Return fp64 [M, V]: natural logarithms of the softmax of each row, at least `LEAST_LOGPROB`.

    Exactness: a row depends on itself alone.
    """
    logits_MV = comparable(logits_MV).to(torch.float64)
    lowest = torch.finfo(torch.float32).min
    shifted_MV = logits_MV - logits_MV.amax(dim=1, keepdim=True).clamp(min=lowest)
    total_M1 = masses(shifted_MV).sum(dim=1, keepdim=True).clamp(min=1).to(torch.float64)
    log_total_M1 = exact_log(total_M1 / FIXED_POINT)
    return (shifted_MV - log_total_M1).clamp(min=LEAST_LOGPROB)


def token_logprobs(
    logits_MV: torch.Tensor, tokens_target_M: torch.Tensor, num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Return what is reported about each row.

    Args:
        logits_MV: fp32, the target's.
        tokens_target_M: int64, the committed token of each row.
        num_top: likeliest ids to report, ranked by (logit descending, id ascending).

    Sync: one.
    """
    logprobs_MV = log_probabilities(logits_MV)
    own_M1 = logprobs_MV.gather(1, tokens_target_M[:, None])
    count = min(num_top, logits_MV.shape[1])
    _, order_MV = torch.sort(comparable(logits_MV), dim=1, descending=True, stable=True)
    ids_MK = order_MV[:, :count]
    values: list[list[float]] = torch.cat([own_M1, logprobs_MV.gather(1, ids_MK)], dim=1).tolist()
    ids: list[list[int]] = ids_MK.tolist()
    return tuple(
        TokenLogprobs(logprob=own, top=tuple(zip(row_ids, top, strict=True)))
        for (own, *top), row_ids in zip(values, ids, strict=True)
    )
