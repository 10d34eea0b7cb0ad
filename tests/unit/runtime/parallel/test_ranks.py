"""Sums in rank order, choices over ranks, threads against processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from runtime.parallel.ranks import (
    OneRank,
    Ranks,
    ThreadExchange,
    choose_highest,
    gather_columns,
    rank_sum,
)

T = TypeVar("T")


def on_all(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """Run `work` on every rank, each in a thread."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, ThreadExchange(size, timeout_s=60).ranks()))


def in_order(partials: Sequence[torch.Tensor]) -> torch.Tensor:
    total = partials[0]
    for partial in partials[1:]:
        total = total + partial
    return total


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_sum_adds_in_rank_order(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    scale = torch.tensor([10.0**power for power in range(-6, 6)])
    partials = [torch.randn(5, 12, generator=generator) * scale for _ in range(size)]
    sums = on_all(size, lambda ranks: rank_sum(ranks, partials[ranks.rank]))
    for found in sums:
        assert torch.equal(found, in_order(partials))


def test_another_order_gives_other_bits() -> None:
    """What the rule is for: without an order the sums of this test would not tell."""
    partials = [torch.tensor([[value]]) for value in (1e8, 1.0, -1e8, 1.0)]
    assert not torch.equal(in_order(partials), in_order(partials[::-1]))


def test_rows_do_not_depend_on_other_rows() -> None:
    partials = [torch.randn(6, 4) for _ in range(3)]
    whole = on_all(3, lambda ranks: rank_sum(ranks, partials[ranks.rank]))[0]
    for row in range(6):
        alone = on_all(
            3, lambda ranks, row=row: rank_sum(ranks, partials[ranks.rank][row : row + 1])
        )
        assert torch.equal(alone[0], whole[row : row + 1])


def test_columns_lie_side_by_side() -> None:
    parts = [torch.full((2, 3), float(rank)) for rank in range(3)]
    found = on_all(3, lambda ranks: gather_columns(ranks, parts[ranks.rank]))
    assert torch.equal(found[1], torch.cat(parts, dim=1))


def test_the_lowest_id_wins_a_tie_over_ranks() -> None:
    values = [torch.tensor([1.0, 2.0, -3.0]), torch.tensor([1.0, 5.0, -3.0])]
    ids = [torch.tensor([7, 1, 90]), torch.tensor([4, 100, 80])]
    for found in on_all(2, lambda r: choose_highest(r, values[r.rank], ids[r.rank])):
        assert found.tolist() == [4, 100, 80]


def test_one_rank_exchanges_nothing() -> None:
    x = torch.randn(2, 3)
    one = OneRank()
    assert rank_sum(one, x) is x
    assert gather_columns(one, x) is x
    assert torch.equal(one.gather(x), x[None])


def test_a_rank_that_fails_wakes_the_others() -> None:
    exchange = ThreadExchange(2, timeout_s=60)
    first, _ = exchange.ranks()
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            first.gather(torch.zeros(1))
        except threading.BrokenBarrierError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    exchange.abort()
    thread.join(60)
    assert len(caught) == 1
