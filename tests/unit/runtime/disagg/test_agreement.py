"""What the ranks of a stage make of transfers that end apart."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime.disagg.agreement import Ended, RankAgreement
from runtime.disagg.failures import carrier_failed
from runtime.parallel.ranks import ThreadExchange

REFUSED = carrier_failed("shared", "CUDA IPC was refused")
NAMES = ("early", "sent", "ill")
OVER: tuple[Mapping[str, Ended], ...] = (
    {"sent": Ended(num_kv_bytes=3), "ill": Ended(num_kv_bytes=1)},
    {
        "early": Ended(num_kv_bytes=9),
        "sent": Ended(num_kv_bytes=4),
        "ill": Ended(problem=REFUSED),
    },
)


def test_a_transfer_is_over_everywhere_and_failed_where_one_rank_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exchange = ThreadExchange(2, timeout_s=60)
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda ranks, over: RankAgreement(ranks).settle(NAMES, over), exchange.ranks(), OVER
        )
    assert list(first) == list(second) == ["sent", "ill"]
    assert first["sent"] == second["sent"] == Ended(num_kv_bytes=7)
    assert (first["ill"].num_kv_bytes, second["ill"].problem) == (1, REFUSED)
    told = first["ill"].problem
    assert told is not None
    assert (told.code, told.where) == ("SD863", "rank 1 of the stage")
    assert told.found == "it failed; its log says why"
    assert [record.getMessage() for record in caplog.records] == [f"ill: {REFUSED.oneline()}"]
