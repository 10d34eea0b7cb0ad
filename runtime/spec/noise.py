"""Which draws a request makes, and their noise: see `runtime.kernels.noise` for how it is made.

Each kind of draw has counters of its own, so that no two decisions share noise. In rejection mode a
draft's own draw is named by its index in the round, too: a position that is drafted again after a
rejection has another index then, so what one round drafts and drops tells nothing about the next.

Legend: M rows of draws, V ids, R ids of a reduced vocabulary, K ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from runtime.batch import on_device
from runtime.kernels.noise import (
    ACCEPT_DRAW,
    MASK_32,
    RESIDUAL_DRAW,
    TOKEN_DRAW,
    NoiseRows,
    uniform,
    words_at,
)

__all__ = [
    "DrawKind",
    "NoiseKey",
    "draft_kind",
    "noise_rows",
    "noise_words",
    "uniform",
]

# Of 8 bytes: columns of any length are aligned alike, so kernels that read them have one variant.
_ALIGNED_INTS = 2


class DrawKind(IntEnum):
    """What a draw is for; kinds never share a counter.

    TOKEN: the target's token at a position (and, in seeded mode, its draft).
    ORACLE: whether a scripted draft is changed.
    ACCEPT: rejection mode: whether the draft at a position stays.
    RESIDUAL: rejection mode: the token in place of a draft that does not stay.
    FIRST_DRAFT: rejection mode: draft 0 of a round; draft j has the j-th kind after it.
    """

    TOKEN = TOKEN_DRAW
    ORACLE = 1
    ACCEPT = ACCEPT_DRAW
    RESIDUAL = RESIDUAL_DRAW
    FIRST_DRAFT = 16


def draft_kind(draft_index: int) -> int:
    """Return the kind of the draw of a draft in rejection mode."""
    return DrawKind.FIRST_DRAFT + draft_index


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseKey:
    """Identity of one row of draws.

    Args:
        seed: the request's seed, taken modulo 2**64.
        choice_index: index among the choices of one request (`n` > 1), below 2**32.
        position: absolute position of the token being chosen, below 2**32.
    """

    seed: int
    choice_index: int
    position: int


def noise_rows(keys: Sequence[NoiseKey], *, device: torch.device) -> NoiseRows:
    """Return keys on the device.

    Sync: none.
    """
    seeds = [key.seed % 2**64 for key in keys]
    padding = [0] * (len(keys) % _ALIGNED_INTS)
    columns = on_device(
        [
            [seed & MASK_32 for seed in seeds] + padding,
            [seed >> 32 for seed in seeds] + padding,
            [key.choice_index for key in keys] + padding,
            [key.position for key in keys] + padding,
        ],
        device=device,
    )[:, : len(keys)]
    return NoiseRows(
        seed_low_M=columns[0],
        seed_high_M=columns[1],
        choice_index_M=columns[2],
        position_M=columns[3],
    )


def noise_words(
    keys: Sequence[NoiseKey], ids_K: torch.Tensor, *, kind: int = DrawKind.TOKEN
) -> torch.Tensor:
    """Return the 32-bit words, int64 [M, K], of M keys for int64 ids [K] (below 2**34).

    Graph-safe: no (the keys come from the host).
    """
    return words_at(noise_rows(keys, device=ids_K.device), ids_K, kind)
