"""Blocks that another process is to write: no round under way may write them, too."""

from __future__ import annotations

import pytest
import torch

from tests.engine_harness import World, make_world
from tests.fake_graph import make_llm
from tests.prefill_cases import prefill_request


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("reserved"))


@pytest.mark.parametrize("num_others", [0, 1])
def test_rounds_of_requests_that_left_end_before_their_blocks_are_handed_out(
    world: World, num_others: int
) -> None:
    """A round is launched ahead of what is read; it writes for a request that left since then."""
    llm, (fake,) = make_llm(world, proposer="eagle3", num_speculative_tokens=2)
    engine = llm.own_engine
    for seed in range(1 + num_others):
        engine.add_request(prefill_request(1 + seed, 9, max_tokens=40))
    while len(fake.shapes) < 3:
        engine.step()
    assert engine.reserve(engine.admit(prefill_request(7, 12)))
    assert fake.num_settled == 0
    assert engine.abort("r1-9")
    assert engine.reserve(engine.admit(prefill_request(8, 12)))
    assert fake.num_settled == 1, "a round that was launched for r1 may still write"


def test_a_round_that_nobody_reads_is_waited_for_once(world: World) -> None:
    llm, (fake,) = make_llm(world, proposer="eagle3", num_speculative_tokens=2)
    engine = llm.own_engine
    engine.add_request(prefill_request(1, 9, max_tokens=40))
    while len(fake.shapes) < 3:
        engine.step()
    assert engine.abort("r1-9")
    engine.add_request(prefill_request(2, 9, max_tokens=40))
    engine.step()  # what was under way for r1 is let go unread
    assert engine.reserve(engine.admit(prefill_request(7, 12)))
    assert fake.num_settled == 1
    assert engine.reserve(engine.admit(prefill_request(8, 12)))
    assert fake.num_settled == 1


def test_a_prefill_that_a_fault_leaves_unread_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, (fake,) = make_llm(world, proposer="eagle3", num_speculative_tokens=2)
    engine = llm.own_engine
    engine.add_request(prefill_request(1, 9, max_tokens=40))
    while len(fake.shapes) < 3:
        engine.step()
    engine.add_request(prefill_request(2, 9, max_tokens=40))
    with monkeypatch.context() as patch:
        patch.setattr(fake, "launch", _out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()  # of the round behind the prefill
    assert fake.num_unread_at_prefill == [0, 1]
    assert engine.abort("r2-9")
    assert engine.reserve(engine.admit(prefill_request(7, 12)))
    assert fake.num_settled == 1, "the prefill may still write into the blocks of r2"
    assert engine.reserve(engine.admit(prefill_request(8, 12)))
    assert fake.num_settled == 1


def _out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError
