"""Scheduling policy without a model: order, row budget, blocks, preemption."""

from __future__ import annotations

import pytest
import torch

from runtime.config import RuntimeConfig
from runtime.engine.block_manager import BlockManager
from runtime.engine.request import Request
from runtime.engine.scheduler import Plan, Scheduler
from runtime.spec.ngram import NgramProposer
from runtime.spec.types import RequestView, SamplingParams

SIZE = 4


class _Eager(NgramProposer):
    """Wants every draft; notes released slots."""

    def __init__(self) -> None:
        super().__init__(device=torch.device("cpu"))
        self.released: list[int] = []

    def max_drafts(self, view: RequestView) -> int:
        return view.num_drafts

    def release(self, slot: int) -> None:
        self.released.append(slot)


def _scheduler(**changes: int) -> tuple[Scheduler, BlockManager, _Eager]:
    values = {
        "kv_block_size": SIZE,
        "num_kv_blocks": 64,
        "max_num_requests": 4,
        "max_num_waiting": 8,
        "max_num_batched_tokens": 64,
        "prefill_chunk_size": 64,
        "max_model_len": 40,
        "num_speculative_tokens": 3,
        **changes,
    }
    config = RuntimeConfig(
        device=torch.device("cpu"),
        dtype=torch.float32,
        draft_width=0,
        proposer="ngram",
        max_ngram=4,
        batch_buckets=(1,),
        enable_prefix_cache=False,
        graphs="off",
        verification="seeded",
        target_vocab_size=100,
        eos_ids_target=(),
        origins={},
        diagnostics=(),
        **values,
    )
    blocks = BlockManager(
        num_blocks=config.num_kv_blocks,
        kv_block_size=SIZE,
        num_lookahead_tokens=0,
        enable_prefix_cache=False,
    )
    proposer = _Eager()
    return Scheduler(config, blocks, proposer), blocks, proposer


def _request(name: str, num_tokens: int) -> Request:
    return Request(
        request_id=name,
        params=SamplingParams(),
        ids_target=[5] * num_tokens,
        num_prompt_tokens=num_tokens,
        max_length=40,
        num_speculative_tokens=3,
        text=None,
    )


def _commit(plan: Plan, *, num_tokens: int = 1) -> None:
    """Pretend the plan ran: requests that yield a token get `num_tokens`."""
    for prefill in plan.prefills:
        is_last = prefill.is_last
        prefill.request.placed.num_computed_tokens = prefill.start + prefill.num_rows
        if is_last:
            prefill.request.ids_target.append(5)
    for decode in plan.decodes:
        decode.request.ids_target.extend([5] * num_tokens)
        decode.request.placed.num_computed_tokens += num_tokens


def _shape(plan: Plan) -> tuple[list[tuple[str, int]], list[tuple[str, int, int]]]:
    return (
        [(work.request.request_id, work.num_drafts) for work in plan.decodes],
        [(work.request.request_id, work.start, work.num_rows) for work in plan.prefills],
    )


def test_decodes_come_first_and_prefills_share_what_is_left() -> None:
    scheduler, _, _ = _scheduler(max_num_batched_tokens=10, prefill_chunk_size=7)
    for name, size in (("a", 5), ("b", 20), ("c", 3)):
        scheduler.add(_request(name, size))
    plan = scheduler.schedule()
    assert _shape(plan) == ([], [("a", 0, 5), ("b", 0, 5)])
    assert [request.request_id for request in plan.admitted] == ["a", "b"]
    _commit(plan)
    plan = scheduler.schedule()
    assert _shape(plan) == ([("a", 3)], [("b", 5, 6)])
    _commit(plan)
    assert _shape(scheduler.schedule()) == ([("a", 3)], [("b", 11, 6)])


def test_drafts_are_given_up_for_rows_before_a_request_is() -> None:
    scheduler, _, _ = _scheduler(max_num_batched_tokens=7)
    for name in "abc":
        scheduler.add(_request(name, 2))
    _commit(scheduler.schedule())
    assert _shape(scheduler.schedule())[0] == [("a", 3), ("b", 1), ("c", 0)]


def test_drafts_are_given_up_for_blocks_before_a_request_is() -> None:
    """Pool of three blocks: a request of 9 tokens has 12 slots, so drafts shrink to what fits."""
    scheduler, _, proposer = _scheduler(num_kv_blocks=4, max_model_len=12)
    scheduler.add(_request("a", 3))
    scheduler.add(_request("b", 2))
    plan = scheduler.schedule()
    assert _shape(plan)[1] == [("a", 0, 3)], "b waits: room for its drafts is part of its need"
    _commit(plan)
    plan = scheduler.schedule()
    _commit(plan, num_tokens=4)
    assert _shape(scheduler.schedule())[0] == [("a", 3)]
    assert proposer.released == []


def test_the_youngest_is_preempted_and_waits_at_the_head() -> None:
    scheduler, blocks, proposer = _scheduler(num_kv_blocks=6, max_model_len=20)
    for name in ("old", "young"):
        scheduler.add(_request(name, 4))
    scheduler.add(_request("later", 4))
    _commit(scheduler.schedule())
    assert scheduler.num_waiting == 1, "five blocks hold two requests of two"
    young = scheduler.running[1]
    slot = young.placed.slot
    for _ in range(3):
        plan = scheduler.schedule()
        _commit(plan, num_tokens=2)
    while young.placement is not None:
        plan = scheduler.schedule()
        _commit(plan, num_tokens=1)
    assert [request.request_id for request in scheduler.running] == ["old"]
    assert proposer.released == [slot]
    assert [work.request.request_id for work in plan.prefills] == [], "its blocks are for the old"
    scheduler.remove(scheduler.running[0])
    plan = scheduler.schedule()
    assert plan.prefills[0].request is young
    assert plan.prefills[0].num_rows == len(young.ids_target), "output is prefilled again, too"
    assert plan.admitted == (), "it was admitted before"
    assert scheduler.num_preemptions == 1
    blocks.check(request.placed.table for request in scheduler.running)


def test_a_lone_request_reaches_the_context_limit_in_the_smallest_pool() -> None:
    scheduler, _, _ = _scheduler(num_kv_blocks=11, max_model_len=40)
    scheduler.add(_request("a", 1))
    request = None
    while request is None or len(request.ids_target) < 40:
        plan = scheduler.schedule()
        assert plan.requests
        request = plan.requests[0]
        for work in plan.decodes:
            assert len(request.ids_target) + work.num_drafts < 40
        _commit(plan)
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize("is_running", [True, False])
def test_remove_gives_everything_back(is_running: bool) -> None:
    scheduler, blocks, proposer = _scheduler(max_num_requests=1)
    first, second = _request("a", 4), _request("b", 4)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()
    scheduler.remove(first if is_running else second)
    assert (scheduler.num_running, scheduler.num_waiting) == ((0, 1) if is_running else (1, 0))
    assert (blocks.num_free_blocks == blocks.num_usable_blocks) == is_running
    assert len(proposer.released) == is_running


def test_a_request_refused_for_lack_of_blocks_is_tried_again_when_more_are_free() -> None:
    scheduler, blocks, _ = _scheduler(num_kv_blocks=8)  # 7 to hand out, 4 tokens each
    first, second = _request("a", 12), _request("b", 12)
    assert not scheduler.may_admit
    scheduler.add(first)
    assert scheduler.may_admit
    scheduler.schedule()
    scheduler.add(second)
    assert scheduler.may_admit
    version = scheduler.version
    assert _shape(scheduler.schedule())[1] == [("a", 0, 12)]
    assert not scheduler.may_admit, "it was refused, and no block came free since"
    assert scheduler.version == version
    scheduler.remove(first)
    assert scheduler.may_admit
    assert scheduler.version != version
    assert _shape(scheduler.schedule())[1] == [("b", 0, 12)]
    assert blocks.num_free_blocks < blocks.num_usable_blocks
