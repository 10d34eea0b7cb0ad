"""Counter-based noise: Philox4x32-10 in exact integer torch ops, and Gumbel values made from it.

A draw is a function of (seed, choice index, absolute position, draw kind, vocabulary id) and of
nothing else: never of a request id, a slot or the batch. The key is the 64-bit seed; the counter is
(id // 4, position, draw kind, choice index) and the id's word is `id % 4`. Every operation is an
integer operation or one correctly rounded IEEE operation per torch op (no library logarithm), so a
value has the same bits in any batch, at any place in it and on any device.

Legend: M rows of draws, V ids, K ids or blocks of ids.
*Source:* Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Random123 vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kernels.exact import exact_log

MASK_32 = 0xFFFFFFFF
_MASK_16 = 0xFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_WORDS = 4
TOKEN_DRAW, ACCEPT_DRAW, RESIDUAL_DRAW = 0, 2, 3
"""Kinds of draws that kernels make: the target's token at a position; in rejection mode whether a
draft stays and the token in its place. Further kinds are named by their users."""

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NoiseRows:
    """What names the draws of M rows, on the device.

    Args:
        seed_low_M: int64, low 32 bits of the request's seed.
        seed_high_M: int64, high 32 bits.
        choice_index_M: int64, below 2**32.
        position_M: int64, absolute position of the token being chosen, below 2**32.
    """

    seed_low_M: torch.Tensor
    seed_high_M: torch.Tensor
    choice_index_M: torch.Tensor
    position_M: torch.Tensor


def _multiply_32(constant: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return high and low 32 bits of a 32x32 product without leaving int64's range."""
    low = (x & _MASK_16) * constant
    middle = (x >> 16) * constant + (low >> 16)
    return middle >> 16, ((middle & _MASK_16) << 16) | (low & _MASK_16)


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Return the four 32-bit words of Philox4x32-10 as int64 tensors in [0, 2**32).

    Args:
        counter: four int64 tensors that broadcast together, each in [0, 2**32).
        key: two such tensors.

    Exactness: integer operations only.
    Graph-safe: yes.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high_0, low_0 = _multiply_32(MULTIPLIERS[0], c0)
        high_1, low_1 = _multiply_32(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 = (k0 + WEYL[0]) & MASK_32
        k1 = (k1 + WEYL[1]) & MASK_32
    return c0, c1, c2, c3


def _block_words(rows: NoiseRows, blocks_K: torch.Tensor, kind: int) -> Words:
    """Return the words of block numbers (id // 4): four int64 tensors [M, K]."""
    position_M1 = rows.position_M[:, None]
    counter = (
        blocks_K,
        position_M1,
        torch.full_like(position_M1, kind),
        rows.choice_index_M[:, None],
    )
    return philox4x32(counter, (rows.seed_low_M[:, None], rows.seed_high_M[:, None]))


def words_at(rows: NoiseRows, ids_K: torch.Tensor, kind: int) -> torch.Tensor:
    """Return the 32-bit words, int64 [M, K], for int64 ids [K] (below 2**34).

    Graph-safe: yes.
    """
    words = _block_words(rows, ids_K >> 2, kind)
    lane = ids_K & 3
    out = words[0]
    for index in range(1, _WORDS):
        out = torch.where(lane == index, words[index], out)
    return out


def uniform(words: torch.Tensor) -> torch.Tensor:
    """Map 32-bit words to float64 in (0, 1): (word + 1/2) / 2**32, exact, never 0 or 1."""
    return (words.to(torch.float64) + 0.5) * 2.0**-32


def gumbel_from_words(words: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel values, fp32, finite, in [-3.2, 22.9], for 32-bit words."""
    return (-exact_log(-exact_log(uniform(words)))).to(torch.float32)


def gumbel_noise(
    rows: NoiseRows, num_ids: int, kind: int, *, ids_R: torch.Tensor | None = None
) -> torch.Tensor:
    """Return Gumbel noise fp32 [M, V] for ids 0..V-1 of each row.

    Args:
        rows: what names the draws.
        num_ids: V.
        kind: of the draw.
        ids_R: the ids, int64, when they are not 0..V-1; V is their number then.

    Exactness: a row has the bits that it has alone.
    Graph-safe: yes.
    """
    if ids_R is not None:
        return gumbel_from_words(words_at(rows, ids_R, kind))
    blocks = torch.arange(-(-num_ids // _WORDS), dtype=torch.int64, device=rows.position_M.device)
    words = torch.stack(_block_words(rows, blocks, kind), dim=-1)
    return gumbel_from_words(words.flatten(start_dim=1)[:, :num_ids])
