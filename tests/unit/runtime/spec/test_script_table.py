"""Scripts on the device against the host's oracle, and drafts whose ids a script replaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.engine.request import RequestInput
from runtime.spec import script_table
from runtime.spec.blend import BlendedProposer
from runtime.spec.noise import DrawKind, noise_words, uniform
from runtime.spec.oracle import DeviceOracleProposer, OracleProposer, OracleScript
from runtime.spec.script_table import Room, ScriptTable, draw_key
from runtime.spec.types import Proposal, RequestView, SamplingParams
from tests.engine_harness import World, prompt_of
from tests.fake_graph import FakeGraph, make_llm
from tests.tiny_block import BlockCase, make_block_world
from tests.tiny_last_state import last_state_world
from tests.tiny_parallel import parallel_world
from tests.unit.runtime.spec.stub_model import CPU, make_view

GAMMA, LENGTH = 5, 64
ROOM = Room(num_slots=4, max_length=LENGTH, max_drafts=GAMMA)
PROMPTS = ((7, 8, 9), (3, 4), (5, 5, 5, 5))
ANSWERS = (tuple(range(20, 50)), (0, 1, 0, 2, 0, 3, 0), ())
SCRIPTS = {
    "verbatim": OracleScript(continuations=dict(zip(PROMPTS, ANSWERS, strict=True))),
    "counts": OracleScript(
        continuations=dict(zip(PROMPTS, ANSWERS, strict=True)), accept_counts=(1, 0, 9, 4)
    ),
    "rates": OracleScript(
        continuations=dict(zip(PROMPTS, ANSWERS, strict=True)), corruption_rates=(0.2, 0.6), seed=4
    ),
}


def views_after(num_output: Sequence[int], wishes: Sequence[int]) -> list[RequestView]:
    return [
        make_view(
            prompt + answer[:done],
            SamplingParams(),
            num_prompt_tokens=len(prompt),
            slot=slot,
            request_id=str(slot),
            num_drafts=wish,
        )
        for slot, (prompt, answer, done, wish) in enumerate(
            zip(PROMPTS, ANSWERS, num_output, wishes, strict=True)
        )
    ]


def rows_of(proposal: Proposal) -> list[list[int]]:
    return proposal.ids_target_BG.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", SCRIPTS)
def test_drafts_of_the_table_are_the_hosts(name: str) -> None:
    host = OracleProposer(SCRIPTS[name], device=CPU)
    table = DeviceOracleProposer(SCRIPTS[name], ROOM, device=CPU)
    seen = set()
    for done in range(12):
        views = views_after((done, min(done, 7), 0), (GAMMA, 1 + done % 3, 2))
        assert [host.max_drafts(view) for view in views] == [
            table.max_drafts(view) for view in views
        ]
        expected, found = host.propose(views), table.propose(views)
        assert found.num_drafts == expected.num_drafts
        assert rows_of(found) == rows_of(expected)
        seen |= set(expected.num_drafts)
        if done == 6:
            for proposer in (host, table):
                proposer.release(0)
    assert {0, GAMMA} <= seen


def test_a_slot_takes_the_script_of_its_new_request() -> None:
    table = DeviceOracleProposer(SCRIPTS["verbatim"], ROOM, device=CPU)
    first, second, _ = views_after((0, 0, 0), (3, 3, 0))
    assert rows_of(table.propose([first])) == [[20, 21, 22]]
    table.release(0)
    assert rows_of(table.propose([replace(second, slot=0)])) == [[0, 1, 0]]


def actions_of_one(script: OracleScript, prompt: tuple[int, ...], room: Room) -> torch.Tensor:
    """Decide about every draft of one request: the readable twin, int8 [P, G]."""
    keys = [draw_key(script, prompt, position) for position in range(room.max_length)]
    lanes = torch.arange(room.max_drafts)
    draws = uniform(noise_words(keys, lanes, kind=DrawKind.ORACLE)).tolist()
    rates = script.corruption_rates or (0.0,)
    actions = torch.zeros((room.max_length, room.max_drafts), dtype=torch.int8)
    for position, row in enumerate(draws):
        for index, draw in enumerate(row):
            if draw < rates[min(index, len(rates) - 1)]:
                actions[position, index] = 2
            elif draw >= 1.0 - script.replacement_rate:
                actions[position, index] = 1
    return actions


@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("at_once", [1, 2 * LENGTH * GAMMA, 1 << 20])
def test_draws_are_those_of_one_request_however_they_are_made(
    kept: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_table, "_MOST_KEPT_BYTES", kept * LENGTH * (8 + GAMMA))
    monkeypatch.setattr(script_table, "_DRAWS_AT_ONCE", at_once)
    # The third request is known by its id, whatever the script says about its prompt.
    known = {PROMPTS[0]: ANSWERS[0], PROMPTS[2]: (8,), PROMPTS[1]: ANSWERS[1], "2": (5, 6)}
    script = OracleScript(
        continuations=known, corruption_rates=(0.2, 0.5), replacement_rate=0.3, seed=2**40 + 7
    )
    table = ScriptTable(script, ROOM, device=CPU)
    first, second, third = views_after((0, 0, 0), (3, 3, 3))
    table.load([third])
    table.load([third, second, first])
    actions_SPG, expected_SP = table._actions_SPG, table._expected_SP
    assert actions_SPG is not None
    for view, answer in zip((first, second, third), (*ANSWERS[:2], (5, 6)), strict=True):
        prompt = PROMPTS[view.slot]
        assert torch.equal(actions_SPG[view.slot], actions_of_one(script, prompt, ROOM))
        room = LENGTH - len(prompt)
        row = [-1] * len(prompt) + [*answer, *[-1] * room][:room]
        assert expected_SP[view.slot].tolist() == row
    assert not actions_SPG[3].any()
    assert set(actions_SPG.flatten().tolist()) == {0, 1, 2}


def test_a_continuation_ends_where_a_request_does() -> None:
    room = replace(ROOM, max_length=6)
    table = ScriptTable(OracleScript(continuations={(1, 2): (7,) * 9}), room, device=CPU)
    table.load([make_view((1, 2), SamplingParams(), num_prompt_tokens=2, slot=1, request_id="a")])
    assert table._expected_SP[1].tolist() == [-1, -1, 7, 7, 7, 7]


class Operations(TorchDispatchMode):
    """Notes what is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [1, 3])
def test_requests_enter_with_few_operations_and_no_host_read(count: int) -> None:
    script = OracleScript(
        continuations=dict(zip(PROMPTS, ANSWERS, strict=True)), corruption_rates=(0.5,)
    )
    table = ScriptTable(script, ROOM, device=CPU)
    with Operations() as seen:
        table.load(views_after((0, 0, 0), (1, 1, 1))[:count])
        num_operations = len(seen.names)
        table.load(views_after((0, 0, 0), (1, 1, 1))[:count])
    assert len(seen.names) == num_operations <= 10, "known requests cost nothing"
    assert not any("_local_scalar_dense" in name or "nonzero" in name for name in seen.names)


def worlds(kind: str, folder: Path) -> World:
    if kind == "peagle":
        return parallel_world(folder, is_agreeing=False)
    if kind.startswith("mtp"):
        return last_state_world(folder, "mtp", num_layers=4 if kind == "mtp-layers" else 1)
    return make_block_world(folder, BlockCase(sample_from_anchor=False))


REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(50 + index, 2 + 6 * index),
        max_tokens=40,
        ignore_eos=True,
    )
    for index in range(3)
)


@pytest.mark.parametrize("kind", ["peagle", "mtp-layers", "dspark"])
@pytest.mark.parametrize(
    "rules",
    [{"accept_counts": (0, 1, 2, 3, 4)}, {"replacement_rate": 0.6, "corruption_rates": (0.2,)}],
)
def test_replaced_ids_reach_every_count_and_change_no_token(
    kind: str, rules: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    world = worlds(kind, tmp_path)
    plain, _ = make_llm(world, is_eager=True, proposer="none")
    longer = [replace(request, max_tokens=48) for request in REQUESTS]
    answers = {one.request_id: one.ids_target for one in plain.generate(longer)}
    script = OracleScript(continuations=dict(answers), seed=2, **rules)
    name = kind.partition("-")[0]
    settings = {"proposer": name, "num_speculative_tokens": 4, "script": script}
    eager, _ = make_llm(world, is_eager=True, **settings)
    ahead, (graph,) = make_llm(world, **settings)
    assert isinstance(ahead.engine._proposer, BlendedProposer)
    assert isinstance(graph, FakeGraph)
    for llm in (eager, ahead):
        for one in llm.generate(REQUESTS):
            assert one.ids_target == answers[one.request_id][:40]
    stats = ahead.engine.stats()
    assert stats.num_device_rounds > 0
    lengths = [
        a - b for a, b in zip(stats.num_accepted_at, (*stats.num_accepted_at[1:], 0), strict=True)
    ]
    assert min(lengths) > 0, "every number of accepted drafts occurs"
    assert stats.num_accepted_at[0] < stats.num_rounds
