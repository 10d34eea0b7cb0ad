"""Draft counts maximise expected tokens per second: checked by going through every choice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config.cost_table import CostTable, bin_end
from runtime.config.round_sizes import (
    RoundMenu,
    draft_counts_up_to,
    packed_row_counts,
)
from runtime.spec.adaptive import (
    ROUNDS_BETWEEN_TRIALS,
    Acceptance,
    AdaptiveLengths,
    Candidate,
    StaticLengths,
)
from tests.linear_costs import NOWHERE, linear_costs

MENU = RoundMenu(batches=(1, 2, 3, 4), draft_counts=draft_counts_up_to(4))


_ROUNDS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12)
_REQUEST = st.tuples(st.integers(0, 4), _ROUNDS, st.lists(st.floats(0, 1), max_size=4))


def _random_costs(seed: int) -> CostTable:
    """Return costs without any order among them: more rows may even be cheaper."""
    draw = random.Random(seed)
    sizes = [size for batch in MENU.batches for size in MENU.sizes(batch)]
    return CostTable(
        measured_on=NOWHERE,
        draft_s={(s.batch, s.num_drafts): draw.random() for s in sizes if s.num_drafts},
        verify_s={(s.batch, bin_end(s.num_rows)): 0.1 + draw.random() for s in sizes},
        num_timings=1,
    )


@settings(max_examples=40, deadline=None)
@given(requests=st.lists(_REQUEST, min_size=1, max_size=3), seed=st.integers(0, 1000))
def test_no_other_choice_has_a_higher_rate(
    requests: list[tuple[int, list[tuple[int, int]], list[float]]], seed: int
) -> None:
    costs = _random_costs(seed)
    lengths = AdaptiveLengths(costs, MENU)
    candidates = []
    for limit, rounds, confidence in requests:
        acceptance = Acceptance()
        for num_drafts, accepted in rounds:
            lengths.observe(
                acceptance,
                num_drafts=max(1, num_drafts),
                num_accepted=min(accepted, max(1, num_drafts)),
                confidence=tuple(confidence),
            )
        candidates.append(Candidate(acceptance=acceptance, limit=limit))
    choice = lengths.choose(candidates)
    assert choice == lengths.choose(candidates)
    survivals = [lengths.survivals(item) for item in candidates]
    rates = {
        (num_drafts, size): (len(candidates) + _expected(survivals, num_drafts))
        / costs.round_s(size.batch, size.num_drafts, size.num_rows)
        for num_drafts in itertools.product(*(range(item.limit + 1) for item in candidates))
        for size in MENU.sizes(len(candidates))
        if max(num_drafts) <= size.num_drafts and sum(num_drafts) + len(candidates) <= size.num_rows
    }
    if choice.size is None:
        assert not any(item.limit for item in candidates)
    else:
        assert rates[choice.num_drafts, choice.size] == pytest.approx(
            max(rates.values()), rel=1e-12
        )


def _expected(survivals: Sequence[Sequence[float]], num_drafts: Sequence[int]) -> float:
    return sum(sum(chances[:count]) for chances, count in zip(survivals, num_drafts, strict=True))


def _after(lengths: AdaptiveLengths, rounds: Sequence[tuple[int, int]]) -> Acceptance:
    acceptance = Acceptance()
    for num_drafts, accepted in rounds:
        lengths.observe(acceptance, num_drafts=num_drafts, num_accepted=accepted, confidence=())
    return acceptance


def test_good_drafts_get_more_and_bad_ones_none() -> None:
    lengths = AdaptiveLengths(linear_costs(MENU, draft_s=0.2, row_s=0.05), MENU)
    good = Candidate(acceptance=_after(lengths, [(4, 4)] * 40), limit=4)
    bad = Candidate(acceptance=_after(lengths, [(4, 0)] * 40), limit=4)
    assert lengths.choose([good]).num_drafts == (4,)
    assert lengths.choose([bad]).num_drafts == (0,)
    first, second = lengths.choose([good, bad]).num_drafts
    assert first > second


def test_costly_drafts_are_not_made() -> None:
    lengths = AdaptiveLengths(linear_costs(MENU, draft_s=2.0), MENU)
    request = Candidate(acceptance=_after(lengths, [(4, 4)] * 10), limit=4)
    assert lengths.choose([request]).num_drafts == (0,)
    assert AdaptiveLengths(linear_costs(MENU, draft_s=0.0), MENU).choose([request]).num_drafts == (
        4,
    )


def test_a_draft_is_tried_again_after_a_while() -> None:
    lengths = AdaptiveLengths(linear_costs(MENU, draft_s=0.5), MENU)
    acceptance = _after(lengths, [(2, 0)] * 40)
    for _ in range(ROUNDS_BETWEEN_TRIALS):
        assert lengths.choose([Candidate(acceptance=acceptance, limit=4)]).num_drafts == (0,)
        lengths.observe(acceptance, num_drafts=0, num_accepted=0, confidence=())
    assert lengths.choose([Candidate(acceptance=acceptance, limit=4)]).num_drafts == (1,)
    assert lengths.choose([Candidate(acceptance=acceptance, limit=0)]).num_drafts == (0,)
    lengths.observe(acceptance, num_drafts=1, num_accepted=0, confidence=())
    assert lengths.choose([Candidate(acceptance=acceptance, limit=4)]).num_drafts == (0,)


def test_a_new_request_starts_from_what_the_engine_saw() -> None:
    lengths = AdaptiveLengths(linear_costs(MENU), MENU)
    new = Candidate(acceptance=Acceptance(), limit=3)
    before = lengths.survivals(new)
    _after(lengths, [(3, 0)] * 30)
    after = lengths.survivals(new)
    assert after[0] < 0.2 < before[0]
    assert before == sorted(before, reverse=True)
    assert after == sorted(after, reverse=True)


def test_only_tried_positions_are_counted() -> None:
    acceptance = Acceptance()
    acceptance.count(4, 1, 0.5)
    assert (acceptance.hits, acceptance.trials) == ([1.0, 0.0], [1.0, 1.0])
    acceptance.count(1, 1, 0.5)
    assert (acceptance.hits, acceptance.trials) == ([1.5, 0.0], [1.5, 1.0])
    acceptance.count(0, 0, 0.5)
    assert acceptance.trials == [1.5, 1.0]


def test_confidence_is_scaled_by_what_it_came_to() -> None:
    """A head that says 0.9 and is right half of the time counts as about a half."""
    lengths = AdaptiveLengths(linear_costs(MENU), MENU)
    acceptance = Acceptance()
    for turn in range(200):
        lengths.observe(acceptance, num_drafts=1, num_accepted=turn % 2, confidence=(0.9, 0.1))
    assert acceptance.confidence == (0.9,), "what was not verified says nothing"
    assert lengths.survivals(Candidate(acceptance=acceptance, limit=1))[0] == pytest.approx(
        0.5, abs=0.02
    )


def test_equal_histories_give_equal_choices() -> None:
    rounds = [(index % 5, (index * index) % 3 if index % 5 > 1 else 0) for index in range(50)]
    found = []
    for _ in range(2):
        lengths = AdaptiveLengths(linear_costs(MENU, draft_s=0.15, row_s=0.02), MENU)
        acceptance, chosen = Acceptance(), []
        for num_drafts, accepted in rounds:
            chosen.append(lengths.choose([Candidate(acceptance=acceptance, limit=4)] * 2))
            lengths.observe(acceptance, num_drafts=num_drafts, num_accepted=accepted, confidence=())
        found.append(chosen)
    assert found[0] == found[1]


def test_static_lengths_are_the_limits() -> None:
    lengths = StaticLengths()
    assert lengths.choose(
        [Candidate(acceptance=Acceptance(), limit=n) for n in (3, 0)]
    ).num_drafts == (3, 0)
    assert lengths.choose([]).num_drafts == ()


def test_sizes() -> None:
    assert draft_counts_up_to(1) == (0, 1)
    assert draft_counts_up_to(5) == (0, 1, 2, 3, 4, 5)
    assert draft_counts_up_to(8) == (0, 1, 2, 3, 4, 6, 8)
    assert draft_counts_up_to(16) == (0, 1, 2, 3, 4, 6, 8, 12, 16)
    assert packed_row_counts(1, 8) == ()
    assert packed_row_counts(2, 1) == ()
    assert packed_row_counts(32, 7) == (64, 128, 192)
    assert MENU.batch_of(9) == 9
    assert [(s.num_drafts, s.num_rows) for s in MENU.sizes(3)] == [
        (0, 3), (1, 6), (2, 8), (2, 9), (3, 8), (3, 12), (4, 8), (4, 15),
    ]  # fmt: skip
    assert [size.is_dense for size in MENU.sizes(3)][:4] == [True, True, False, True]
