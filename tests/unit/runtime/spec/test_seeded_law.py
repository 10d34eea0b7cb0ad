"""Seeded sampling draws from the processed distribution, and drafts cannot bend it.

Three steps. (1) The noise is the inverse distribution function of a uniform (test_noise). (2) For a
grid of uniforms, the share of grid points at which the choice is i equals p(i) within a bound that
holds for any monotone region, without statistics. (3) For every grid point and every draft, the
committed tokens are those of target-only decoding. Fixed counters are then compared by chi-square;
the seed is fixed, so the figure is a constant.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

import runtime.spec.verify as verify_module
from runtime.kernels.noise import NoiseRows, gumbel_from_words
from runtime.spec.noise import NoiseKey
from runtime.spec.sampling import TokenCounts, process_logits
from runtime.spec.types import SamplingParams
from tests.unit.runtime.spec.stub_model import (
    choose_with,
    gumbel_rows,
    hash_model,
    law,
    make_view,
    run_round,
)

LOGITS = (0.3, -1.2, 2.2, 0.9, 1.4, -0.7, 2.0, 0.1)
VARIANTS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.5, top_k=5),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.2, min_p=0.2),
    SamplingParams(temperature=0.3, top_p=0.5, top_k=2),
    SamplingParams(temperature=0.3, top_p=0.7, top_k=2),
    SamplingParams(temperature=1.4, top_p=0.9, top_k=6, min_p=0.05),
]
EMPTY = TokenCounts(num_output=0)
choose_rows = torch.func.vmap(choose_with, in_dims=(None, 0))
choose_rows_with = torch.func.vmap(choose_with)


def grid_noise(num_strata: int) -> torch.Tensor:
    """Return the Gumbel value of the middle of each of `num_strata` equal parts of (0, 1)."""
    words = ((torch.arange(num_strata, dtype=torch.float64) + 0.5) / num_strata * 2**32).floor()
    return gumbel_from_words(words.to(torch.int64))


@pytest.mark.parametrize(("num_ids", "num_strata"), [(2, 1024), (3, 64), (4, 22)])
@pytest.mark.parametrize("params", VARIANTS)
def test_choices_over_a_noise_grid_have_the_law(
    num_ids: int, num_strata: int, params: SamplingParams
) -> None:
    """The set of uniforms where id i wins is monotone in every coordinate.

    The border of such a set meets at most K^V - (K - 1)^V of the K^V cells, so counting midpoints
    misses its volume p(i) by at most V / K.
    """
    logits = LOGITS[:num_ids]
    processed = process_logits(torch.tensor(logits), params, EMPTY)
    grid = torch.cartesian_prod(*[grid_noise(num_strata)] * num_ids)
    share = torch.bincount(choose_rows(processed, grid), minlength=num_ids) / grid.shape[0]
    bound = 1 - (1 - 1 / num_strata) ** num_ids
    for found, wanted in zip(share.tolist(), law(logits, params), strict=True):
        assert abs(found - wanted) <= bound + 1e-6
        assert found > 0 or wanted <= bound


def two_token_rounds(
    monkeypatch: pytest.MonkeyPatch, noise: Sequence[Sequence[float]], drafts: Sequence[int]
) -> tuple[int, ...]:
    """Commit two tokens after a prompt, where the noise of position p is noise[p - 2]."""

    def stub(
        weights_MV: torch.Tensor, rows: NoiseRows, kind: int, *, is_sampled_M: torch.Tensor
    ) -> torch.Tensor:
        added = [noise[min(position - 2, 1)] for position in rows.position_M.tolist()]
        return choose_rows_with(weights_MV, torch.tensor(added).reshape(weights_MV.shape))

    monkeypatch.setattr(verify_module, "sample", stub)
    model = hash_model(3, 3)
    ids: tuple[int, ...] = (0, 1)
    while len(ids) < 4:
        view = make_view(ids, SamplingParams(temperature=4.0), num_prompt_tokens=2)
        ids += run_round(model, [view], [drafts if len(ids) == 2 else ()]).committed[0]
    return ids[2:4]


def test_no_draft_changes_the_tokens_at_any_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal at every point of the noise space that was tried means an equal law."""
    grid = grid_noise(3).tolist()
    tables = list(itertools.product(itertools.product(grid, repeat=3), repeat=2))[::5]
    seen = set()
    for noise in tables:
        expected = two_token_rounds(monkeypatch, noise, ())
        seen.add(expected)
        for drafts in itertools.product(range(3), repeat=2):
            assert two_token_rounds(monkeypatch, noise, drafts) == expected
    assert len(seen) == 9


@pytest.mark.parametrize("params", VARIANTS)
def test_counters_have_the_law(params: SamplingParams) -> None:
    """C093: support and frequencies of 20,000 counters on a vocabulary of 8."""
    num_draws = 20_000
    processed = process_logits(torch.tensor(LOGITS), params, EMPTY)
    keys = [NoiseKey(seed=2024, choice_index=0, position=p) for p in range(num_draws)]
    chosen = choose_rows(processed, gumbel_rows(keys, num_ids=len(LOGITS)))
    counts = torch.bincount(chosen, minlength=len(LOGITS)).tolist()
    expected = [p * num_draws for p in law(LOGITS, params)]
    assert [c > 0 for c in counts] == [e > 0 for e in expected]
    support = [i for i, e in enumerate(expected) if e > 0]
    chi_square = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in support)
    freedom = len(support) - 1
    if freedom == 0:
        return
    # Wilson-Hilferty value that chi-square exceeds once in 10^4 tries.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert chi_square < limit


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    """Pairs of choices at p and p + 1, and at seeds s and s + 1, have the product law."""
    params = SamplingParams(temperature=1.0, top_k=3)
    processed = process_logits(torch.tensor(LOGITS), params, EMPTY)
    by_position = [NoiseKey(seed=5, choice_index=0, position=p) for p in range(20_000)]
    by_seed = [NoiseKey(seed=s, choice_index=0, position=17) for s in range(20_000)]
    p = law(LOGITS, params)
    for keys in (by_position, by_seed):
        chosen = choose_rows(processed, gumbel_rows(keys, num_ids=8))
        pairs = torch.bincount(chosen[0::2] * 8 + chosen[1::2], minlength=64).tolist()
        expected = [p[i // 8] * p[i % 8] * 10_000 for i in range(64)]
        chi_square = sum((c - e) ** 2 / e for c, e in zip(pairs, expected, strict=True) if e > 0)
        assert chi_square < 31.8  # 8 degrees of freedom, once in 10^4
