"""The twin of the kernel that keeps a slot's own ids, against lists."""

from __future__ import annotations

import pytest
import torch

from runtime.kernels import keep_own_ids
from tests.kernels.own_ids import PADDING, CommittingRound, Rings, make_round


def first_round(ids: list[int], *, accepted: int) -> CommittingRound:
    """Return a dense round of one request, in slot 2."""
    return CommittingRound(
        slots_B=torch.tensor([2]),
        next_ids_N=torch.tensor(ids),
        first_rows_B=None,
        last_rows_B=torch.tensor([accepted]),
        width=len(ids),
        committed=[ids[: accepted + 1]],
    )


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("num_places", [1, 2, 5, 9, 64])
@pytest.mark.parametrize("width", range(1, 10))
def test_rounds_leave_what_lists_would(width: int, num_places: int, is_packed: bool) -> None:
    generator = torch.Generator().manual_seed(width + 10 * num_places)
    found, expected = Rings.empty(num_places), Rings.empty(num_places)
    for _ in range(12):
        told = make_round(width, is_packed=is_packed, generator=generator)
        told.keep(keep_own_ids, found)
        told.keep_by_hand(expected)
        assert torch.equal(found.ids_SE, expected.ids_SE)
        assert torch.equal(found.counts_S, expected.counts_S)
    assert found.counts_S.max() > 1
    assert found.counts_S[PADDING] == 0
    assert found.ids_SE[PADDING].eq(-1).all()


@pytest.mark.parametrize(
    ("ids", "accepted", "num_places", "ring", "count"),
    [
        ([1, 2, 4], 2, 4, [1, 2, 4, -1], 3),  # in the order of the text
        ([1, 2, 4], 1, 4, [1, 2, -1, -1], 2),  # what was not accepted stays out
        ([1, 3, 6, 2], 3, 4, [1, 2, -1, -1], 2),  # 3 and 6 are in the map
        ([1, 1, 2, 1], 3, 4, [1, 2, -1, -1], 2),  # once each
        ([1, 2, 4, 5, 7], 4, 2, [7, 5], 5),  # more than there are places
        ([1, 2, 1, 2], 3, 1, [2], 4),  # one that left comes again
        ([1, 2, 4, 1], 3, 3, [1, 2, 4], 3),
        ([1, 2, 4, 5, 1], 4, 3, [5, 1, 4], 5),
    ],
)
def test_one_round(
    ids: list[int], accepted: int, num_places: int, ring: list[int], count: int
) -> None:
    found, by_hand = Rings.empty(num_places), Rings.empty(num_places)
    told = first_round(ids, accepted=accepted)
    told.keep(keep_own_ids, found)
    told.keep_by_hand(by_hand)
    for rings in (found, by_hand):
        assert rings.ids_SE[2].tolist() == ring
        assert int(rings.counts_S[2]) == count
        others = [slot for slot in range(PADDING + 1) if slot != 2]
        assert rings.ids_SE[others].eq(-1).all()
