"""What the tile tables share: facts of architectures and the rules for shapes outside the tables.

Legend: N output features, K input features.
"""

from __future__ import annotations

from typing import Literal

Overlap = Literal["never", "leads", "at once", "started"]
"""How a kernel's launch overlaps its neighbours; bits do not depend on it.

"never": not at all. "leads": it starts when its predecessor has ended, and lets its successor start
at its own start. "at once" and "started": it may start while its predecessor ends, and lets its
successor start at its own start, or once it has waited.
"""

BLOCK_M_CHOICES = (16, 32, 64)
"""Rows of a program; the number of rows at hand chooses, since it moves no bit."""

_STAGE_BYTES = {90: 196_608, 100: 196_608, 103: 196_608}  # shared memory of a load pipeline
_STAGE_BYTES_UNKNOWN = 98_304  # fits every architecture since sm_80
_NUM_SMS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 103: 148, 120: 188}
_NUM_SMS_UNKNOWN = 128


def block_m_for(num_rows: int) -> int:
    """Return the rows of a program: the smallest choice that holds all rows, else the largest."""
    for block_m in BLOCK_M_CHOICES:
        if num_rows <= block_m:
            return block_m
    return BLOCK_M_CHOICES[-1]


def rule_facts() -> list[object]:
    """Return everything here that fixes bits, for the digest of the tables."""
    return [BLOCK_M_CHOICES, _NUM_SMS, _NUM_SMS_UNKNOWN]


def num_sms(arch: int) -> int:
    """Return the multiprocessors that the rules count on for an architecture."""
    return _NUM_SMS.get(arch, _NUM_SMS_UNKNOWN)


def rule_block_k(in_features: int, element_bytes: int) -> int:
    """Return BLOCK_K of a weight outside the tables."""
    if element_bytes == 4:
        return 32
    if in_features <= 32:
        return 32
    return 128 if in_features >= 1536 else 64


def rule_stages(block_n: int, block_k: int, element_bytes: int, arch: int, *, most: int = 4) -> int:
    """Return the deepest pipeline, at most `most` stages, that fits with the largest BLOCK_M."""
    stage_bytes = (BLOCK_M_CHOICES[-1] + block_n) * block_k * element_bytes
    return max(2, min(most, _STAGE_BYTES.get(arch, _STAGE_BYTES_UNKNOWN) // stage_bytes))
