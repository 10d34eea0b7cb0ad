"""Masks of target ids as bits, and rows that leave no id to choose.

A mask is X = ceil(V / 32) words of int32; bit `v % 32` of word `v // 32` allows id v. This is the
layout that grammar libraries write, and an eighth of what bools take on their way to the device.

Legend: M rows, V target ids, X words of a mask.
"""

from __future__ import annotations

import torch

WORD_BITS = 32
NO_FAULT, NOT_A_NUMBER, NOTHING_LEFT = 0, 1, 2


def num_mask_words(num_ids: int) -> int:
    """Return X of a mask over `num_ids` ids."""
    return -(-num_ids // WORD_BITS)


def unpack_mask(words_MX: torch.Tensor, num_ids: int) -> torch.Tensor:
    """Return bool [M, V] of int32 [M, X]; bits beyond V are nobody's.

    Exactness: integers.
    Graph-safe: yes.
    """
    bits_32 = torch.arange(WORD_BITS, dtype=torch.int32, device=words_MX.device)
    bits_MV = (words_MX[:, :, None] >> bits_32) & 1
    return bits_MV.flatten(start_dim=1)[:, :num_ids].bool()


def row_faults(logits_MV: torch.Tensor, processed_MV: torch.Tensor) -> torch.Tensor:
    """Return int64 [M]: why no token can be chosen in a row, or `NO_FAULT`.

    Args:
        logits_MV: the target's.
        processed_MV: after the request's options.

    Graph-safe: yes.
    """
    is_nan_M = logits_MV.isnan().any(dim=1)
    is_empty_M = (processed_MV == -torch.inf).all(dim=1)
    faults_M = torch.where(is_empty_M, NOTHING_LEFT, NO_FAULT)
    return torch.where(is_nan_M, NOT_A_NUMBER, faults_M)


def drafts_before_faults(num_drafts_B: torch.Tensor, faults_BW: torch.Tensor) -> torch.Tensor:
    """Return int64 [B], the drafts that a round may accept: it ends before a faulty row.

    The tokens before that row may end the request; else the row is the first one of the next round.

    Args:
        num_drafts_B: int64, drafts that count.
        faults_BW: int64, codes of `row_faults` of each request's rows.

    Exactness: integers.
    Sync: none.
    Graph-safe: yes.
    """
    num_sound_B = (faults_BW == NO_FAULT).to(torch.int64).cumprod(dim=1).sum(dim=1)
    return torch.minimum(num_drafts_B, (num_sound_B - 1).clamp(min=0))
