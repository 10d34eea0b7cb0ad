"""Places of a layout: a bijection, neighbours, and where rank 0 is."""

from __future__ import annotations

import pytest

from runtime.parallel.layout import ParallelLayout

LAYOUTS = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (3, 4)]


@pytest.mark.parametrize(("pp", "tp"), LAYOUTS)
def test_every_rank_has_one_place(pp: int, tp: int) -> None:
    layout = ParallelLayout(pipeline_parallel=pp, tensor_parallel=tp)
    places = [layout.place(rank) for rank in range(layout.world_size)]
    assert [place.rank for place in places] == list(range(pp * tp))
    assert len({(place.stage, place.tp_rank) for place in places}) == pp * tp


@pytest.mark.parametrize(("pp", "tp"), LAYOUTS)
def test_neighbours_hold_the_same_shard_of_the_stages_around(pp: int, tp: int) -> None:
    layout = ParallelLayout(pipeline_parallel=pp, tensor_parallel=tp)
    for rank in range(layout.world_size):
        place = layout.place(rank)
        if place.next_rank is None:
            assert place.is_last
            continue
        after = layout.place(place.next_rank)
        assert (after.stage, after.tp_rank) == (place.stage + 1, place.tp_rank)
        assert after.previous_rank == rank


def test_rank_0_is_on_the_last_stage() -> None:
    layout = ParallelLayout(pipeline_parallel=3, tensor_parallel=2)
    assert layout.place(0).is_last
    assert layout.stage_ranks(2) == (0, 1)
    assert layout.stage_ranks(0) == (4, 5)
    assert layout.place(4).is_first
