"""The noise is Philox4x32-10 bit for bit, a function of its key alone, finite, and Gumbel."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from runtime.kernels.noise import gumbel_from_words, gumbel_noise, philox4x32, uniform
from runtime.spec.noise import DrawKind, NoiseKey, noise_rows, noise_words
from tests.unit.runtime.spec.stub_model import CPU, gumbel, gumbel_rows

FULL = 0xFFFFFFFF
# Random123's known-answer vectors for philox4x32-10: counter, key, output.
VECTORS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (FULL, FULL, FULL, FULL),
        (FULL, FULL),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def reference_philox(counter: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Philox4x32-10 with Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & FULL, seed >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & FULL, (p0 >> 32) ^ c3 ^ k1, p0 & FULL
        k0, k1 = (k0 + 0x9E3779B9) & FULL, (k1 + 0xBB67AE85) & FULL
    return c0, c1, c2, c3


def keys_for(positions: range) -> list[NoiseKey]:
    return [NoiseKey(seed=7 * p + 1, choice_index=p % 3, position=p) for p in positions]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    words = philox4x32((c0, c1, c2, c3), (k0, k1))
    assert tuple(int(word) for word in words) == expected


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 5, 2**31, 2**32 - 1])
def test_words_follow_the_documented_counter(seed: int, position: int) -> None:
    key = NoiseKey(seed=seed, choice_index=9, position=position)
    ids = [0, 1, 2, 3, 4, 49151, 248319]
    found = noise_words([key], torch.tensor(ids), kind=DrawKind.ORACLE)[0].tolist()
    counters = [(i // 4, position, int(DrawKind.ORACLE), 9) for i in ids]
    assert found == [
        reference_philox(counter, seed)[i % 4] for counter, i in zip(counters, ids, strict=True)
    ]


def test_seed_is_taken_modulo_two_to_the_64() -> None:
    below, above = (
        gumbel(NoiseKey(seed=seed, choice_index=0, position=3), num_ids=9)
        for seed in (-1, 2**64 - 1)
    )
    assert torch.equal(below, above)


def test_any_batching_gives_the_same_bits() -> None:
    keys = keys_for(range(40))
    together = gumbel_rows(keys, num_ids=257)
    for m, key in enumerate(keys):
        assert torch.equal(together[m], gumbel(key, num_ids=257))
    order = [13, 2, 39, 2, 0]
    assert torch.equal(gumbel_rows([keys[m] for m in order], num_ids=257), together[order])


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_rows_of_any_number_are_aligned_alike(count: int) -> None:
    """Kernels are compiled by whether an address is divisible by 16: it never depends on rows."""
    keys = [NoiseKey(seed=-index, choice_index=index, position=4 * index) for index in range(count)]
    rows = noise_rows(keys, device=CPU)
    columns = (rows.seed_low_M, rows.seed_high_M, rows.choice_index_M, rows.position_M)
    for column_M in columns:
        assert column_M.shape == (count,)
        assert column_M.is_contiguous()
        assert column_M.data_ptr() % 16 == 0
    assert rows.position_M.tolist() == [key.position for key in keys]


def test_ids_select_from_the_same_row() -> None:
    keys = keys_for(range(5))
    full = gumbel_rows(keys, num_ids=300)
    ids = torch.tensor([299, 0, 7, 7, 128, 3])
    rows = noise_rows(keys, device=CPU)
    assert torch.equal(gumbel_noise(rows, len(ids), DrawKind.TOKEN, ids_R=ids), full[:, ids])
    assert torch.equal(gumbel_rows(keys, num_ids=11), full[:, :11])


def test_every_part_of_the_key_matters() -> None:
    key = NoiseKey(seed=1, choice_index=0, position=0)
    base = gumbel(key, num_ids=64)
    others = [
        gumbel(replace(key, seed=2), num_ids=64),
        gumbel(replace(key, seed=1 + 2**32), num_ids=64),
        gumbel(replace(key, choice_index=1), num_ids=64),
        gumbel(replace(key, position=1), num_ids=64),
        gumbel(key, num_ids=64, kind=DrawKind.ORACLE),
    ]
    for other in others:
        assert int((base == other).sum()) <= 1


def test_no_word_gives_an_infinite_or_undefined_value() -> None:
    words = torch.tensor([0, 1, 2**31 - 1, 2**31, FULL - 1, FULL])
    values = gumbel_from_words(words)
    assert bool(torch.isfinite(values).all())
    assert values.dtype == torch.float32
    assert -3.2 < float(values[0]) < float(values[-1]) < 22.9
    assert float(uniform(words)[0]) > 0.0
    assert float(uniform(words)[-1]) < 1.0


def test_values_are_the_inverse_distribution_function() -> None:
    """exp(-exp(-g)) is the uniform that g was made from: to fp32, and increasing in the word."""
    words = torch.cat([torch.arange(0, 2**32, 65537), torch.tensor([FULL])])
    values = gumbel_from_words(words)
    for word, value in zip(words[::61].tolist(), values[::61].tolist(), strict=True):
        exact = -math.log(-math.log((word + 0.5) / 2**32))
        # Half a unit in the last place of fp32, and a little for math.log itself.
        assert abs(value - exact) <= 6.1e-8 * max(1e-3, abs(exact))
    assert bool((values.diff() >= 0).all())
