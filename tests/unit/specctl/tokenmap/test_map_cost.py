"""The cost model: its sums, its limits, and that its choice is the best of all sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.tokenmap.cost import NEAR_BEST, CostFacts, accepted_drafts, best_size, estimate

FACTS = CostFacts(
    target_vocab_size=1000,
    head_row_bytes=100,
    draft_bytes=20_000,
    draft_layers=1,
    target_bytes=400_000,
    target_layers=4,
    num_speculative_tokens=3,
    is_block=False,
    acceptance=0.7,
    lost_ratio=1.0,
    bandwidth=1e9,
    layer_overhead_s=0.0,
    origins={},
)


def test_the_numbers_by_hand() -> None:
    found = estimate(FACTS, 250, 0.9)
    assert found.accepted_drafts == pytest.approx(0.63 + 0.63**2 + 0.63**3)
    assert found.draft_s == pytest.approx(3 * (25_000 + 20_000) / 1e9)
    assert found.round_s == pytest.approx(found.draft_s + 400_000 / 1e9)
    full = (1 + 0.7 + 0.49 + 0.343) / (3 * 120_000 + 400_000)
    own = (1 + found.accepted_drafts) / (3 * 45_000 + 400_000)
    assert found.speedup == pytest.approx(own / full)
    assert found.head_bytes == 25_000


def test_lost_tokens_that_are_never_accepted_cost_nothing() -> None:
    assert estimate(replace(FACTS, lost_ratio=0.0), 250, 0.9).accepted_drafts == pytest.approx(
        accepted_drafts(0.7, 3)
    )
    # SmolLM2 with an MTP draft, 8,192 ids: 0.633 accepted drafts become 0.620 at 6.5 % lost tokens.
    measured = replace(FACTS, acceptance=0.404, lost_ratio=0.2)
    assert estimate(measured, 250, 0.9347).accepted_drafts == pytest.approx(0.620, abs=0.003)


def test_the_full_head_is_the_unit_and_a_block_reads_it_once() -> None:
    assert estimate(FACTS, 1000, 1.0).speedup == pytest.approx(1.0)
    block = replace(FACTS, is_block=True)
    assert estimate(block, 1000, 1.0).draft_s == pytest.approx(120_000 / 1e9)
    assert accepted_drafts(1.0, 5) == 5
    assert accepted_drafts(0.0, 5) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(0, 1))
def test_the_choice_is_the_fastest_and_its_range_is_as_fast(
    values: list[float], acceptance: float
) -> None:
    facts = replace(FACTS, acceptance=acceptance)
    sizes = tuple(range(10, 10 + 10 * len(values), 10))
    coverage = dict(zip(sizes, sorted(values), strict=True))
    choice = best_size(facts, sizes, coverage.__getitem__)
    speeds = {size: estimate(facts, size, coverage[size]).speedup for size in sizes}
    assert choice.best.speedup == max(speeds.values())
    assert choice.best.size == min(s for s, v in speeds.items() if v == max(speeds.values()))
    inside = [s for s in sizes if choice.near_low <= s <= choice.near_high]
    assert choice.best.size in inside
    assert all(speeds[s] >= NEAR_BEST * choice.best.speedup for s in inside)
