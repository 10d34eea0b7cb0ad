"""Forced accept lengths: the schedule, what a round commits, and both paths following it."""

from __future__ import annotations

import pytest
import torch

from runtime.config import Overrides, resolve_config
from runtime.engine.build import build_engine
from runtime.engine.device_rounds import MakeRunner
from runtime.engine.engine import Engine
from runtime.engine.request import RequestInput
from runtime.spec.forced import ForcedLengths
from tests.engine_harness import KV_BLOCK_SIZE, World
from tests.fake_graph import FakeGraph, make_agreeing_world

RATES = (0.8, 0.5, 0.5, 0.1)
PROMPTS = ([5, 6, 7], [40, 41], [9] * 7)


def test_the_schedule_has_its_rates_and_follows_seed_slot_and_length() -> None:
    lengths, slots = torch.arange(4000), torch.arange(4000) % 7
    most = torch.full_like(slots, 4)
    accepted = ForcedLengths(rates=RATES, seed=3).accepted(slots, lengths, most)
    for depth, rate in enumerate(RATES, start=1):
        assert float((accepted >= depth).double().mean()) == pytest.approx(rate, abs=0.03)
    assert torch.equal(accepted, ForcedLengths(rates=RATES, seed=3).accepted(slots, lengths, most))
    assert not torch.equal(
        accepted, ForcedLengths(rates=RATES, seed=4).accepted(slots, lengths, most)
    )
    other = ForcedLengths(rates=RATES, seed=3).accepted(slots + 1, lengths, most)
    assert not torch.equal(accepted, other)
    few = ForcedLengths(rates=RATES, seed=3).accepted(slots, lengths, slots % 3)
    assert torch.equal(few, torch.minimum(accepted, slots % 3))


def test_a_round_commits_drafts_then_the_targets_choice() -> None:
    drafts, chosen = torch.tensor([[1, 2, 3]] * 4), torch.tensor([[7, 2, 9, 8]] * 4)
    accepted = torch.tensor([0, 1, 2, 3])
    found = ForcedLengths(rates=()).choose(drafts, chosen, accepted)
    assert found.tolist() == [[7, 2, 9, 8], [1, 2, 9, 8], [1, 2, 9, 8], [1, 2, 3, 8]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_agreeing_world(tmp_path_factory.mktemp("forced"))


def answers(engine: Engine) -> dict[str, list[int]]:
    ids: dict[str, list[int]] = {}
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(
            RequestInput(
                request_id=str(index), prompt_ids_target=prompt, max_tokens=40, ignore_eos=True
            )
        )
    while engine.has_work:
        for delta in engine.step():
            ids.setdefault(delta.request_id, []).extend(delta.ids_target)
    return ids


def make_engine(world: World, forced: ForcedLengths | None, runner: MakeRunner | None) -> Engine:
    given = Overrides(
        device="cpu", kv_block_size=KV_BLOCK_SIZE, max_num_requests=4, max_model_len=128
    )
    config = resolve_config(world.manifest, given)
    return build_engine(world.models, config, forced=forced, make_runner=runner)


def test_both_paths_follow_one_schedule(world: World) -> None:
    forced = ForcedLengths(rates=RATES, seed=5)
    eager, device = make_engine(world, forced, None), make_engine(world, forced, FakeGraph)
    assert answers(device) == answers(eager)
    assert device.stats().num_device_rounds > 0
    rates = device.stats().acceptance_per_position
    assert rates[0] > rates[1] >= rates[3]
    assert rates[0] == pytest.approx(RATES[0], abs=0.2)
    assert answers(make_engine(world, None, None)) != answers(make_engine(world, forced, None))


def test_no_accepted_draft_is_target_only_decoding(world: World) -> None:
    """Length 1 at every round: each token is the target's own, as without a draft."""
    plain = answers(make_engine(world, None, None))
    assert answers(make_engine(world, ForcedLengths(rates=(0.0,)), FakeGraph)) == plain
