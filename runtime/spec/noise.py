"""Counter-based noise: Philox4x32-10 in exact integer torch ops, and Gumbel values made from it.

A draw is a function of (seed, choice index, absolute position, draw kind, vocabulary id) and of
nothing else: never of a request id, a slot or the batch. The key is the 64-bit seed; the counter is
(id // 4, position, draw kind, choice index) and the id's word is `id % 4`. Every operation is an
integer operation or one correctly rounded IEEE operation per torch op (no library logarithm), so a
value has the same bits in any batch, at any place in it and on any device.

Legend: M rows of draws, V ids, R ids of a reduced vocabulary, K ids or blocks of ids.

*Source:* Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Random123 vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from runtime.spec.host import on_device

_MASK_32 = 0xFFFFFFFF
_MASK_16 = 0xFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORDS = 4
_SQRT_HALF = math.sqrt(0.5)
_LN2 = math.log(2.0)
# atanh(s) = s + s^3/3 + ...; |s| <= 0.1716 after reduction: what is left out is below 3e-17 of it.
_ATANH_TERMS = tuple(1.0 / odd for odd in range(19, 0, -2))

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class DrawKind(IntEnum):
    """What a draw is for; kinds never share a counter."""

    TOKEN = 0
    ORACLE = 1


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
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply_32(_MULTIPLIERS[0], c0)
        high_1, low_1 = _multiply_32(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 = (k0 + _WEYL[0]) & _MASK_32
        k1 = (k1 + _WEYL[1]) & _MASK_32
    return c0, c1, c2, c3


def _counter_words(keys: Sequence[NoiseKey], blocks: torch.Tensor, kind: DrawKind) -> Words:
    """Return the words of M keys for int64 block numbers [K] (id // 4): four tensors [M, K]."""

    def column(values: list[int]) -> torch.Tensor:
        return on_device(values, device=blocks.device)[:, None]

    seeds = [key.seed % 2**64 for key in keys]
    counter = (
        blocks,
        column([key.position for key in keys]),
        column([int(kind)] * len(keys)),
        column([key.choice_index for key in keys]),
    )
    return philox4x32(
        counter, (column([s & _MASK_32 for s in seeds]), column([s >> 32 for s in seeds]))
    )


def noise_words(
    keys: Sequence[NoiseKey], ids_K: torch.Tensor, *, kind: DrawKind = DrawKind.TOKEN
) -> torch.Tensor:
    """Return the 32-bit words, int64 [M, K], of M keys for int64 ids [K] (below 2**34).

    Graph-safe: no (the keys come from the host).
    """
    words = _counter_words(keys, ids_K >> 2, kind)
    lane = ids_K & 3
    out = words[0]
    for index in range(1, _WORDS):
        out = torch.where(lane == index, words[index], out)
    return out


def uniform(words: torch.Tensor) -> torch.Tensor:
    """Map 32-bit words to float64 in (0, 1): (word + 1/2) / 2**32, exact, never 0 or 1."""
    return (words.to(torch.float64) + 0.5) * 2.0**-32


def _exact_log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive float64 in separately rounded IEEE operations.

    Within a few units in the last place; the same bits on every device, which a library logarithm
    (vectorised, with its own tail) does not promise.
    """
    mantissa, exponent = torch.frexp(x)
    is_low = mantissa < _SQRT_HALF
    mantissa = torch.where(is_low, mantissa * 2.0, mantissa)
    exponent = exponent.to(torch.float64) - is_low.to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = torch.full_like(s, _ATANH_TERMS[0])
    for term in _ATANH_TERMS[1:]:
        series = series * square
        series = series + term
    return exponent * _LN2 + (series * s) * 2.0


def gumbel_from_words(words: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel values, fp32, finite, in [-3.2, 22.9], for 32-bit words."""
    return (-_exact_log(-_exact_log(uniform(words)))).to(torch.float32)


def gumbel_rows(
    keys: Sequence[NoiseKey],
    *,
    num_ids: int,
    device: torch.device,
    kind: DrawKind = DrawKind.TOKEN,
) -> torch.Tensor:
    """Return Gumbel noise fp32 [M, V] for ids 0..V-1 of each row.

    Exactness: a row has the bits that it has alone.
    """
    blocks = torch.arange(-(-num_ids // _WORDS), dtype=torch.int64, device=device)
    words = torch.stack(_counter_words(keys, blocks, kind), dim=-1)
    return gumbel_from_words(words.flatten(start_dim=1)[:, :num_ids])


def gumbel_at(
    keys: Sequence[NoiseKey], ids_target_R: torch.Tensor, *, kind: DrawKind = DrawKind.TOKEN
) -> torch.Tensor:
    """Return the noise of `gumbel_rows` at the given ids only: fp32 [M, R]."""
    return gumbel_from_words(noise_words(keys, ids_target_R, kind=kind))
