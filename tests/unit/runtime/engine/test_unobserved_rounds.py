"""A draft that fails to observe a round: the round's tokens are delivered, then the fault."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from runtime.config import Overrides
from runtime.engine.request import RequestDelta, RequestInput
from tests.engine_harness import Rig, World, drive, make_rig, make_world
from tests.prefill_cases import prefill_request

PROMPTS = (9, 30, 5)  # tokens; the second one is prefilled in two chunks
NUM_TOKENS = 10
GIVEN = Overrides(proposer="eagle3", num_speculative_tokens=2, prefill_chunk_size=16)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("unobserved"))


def _requests() -> list[RequestInput]:
    return [
        prefill_request(seed, length, max_tokens=NUM_TOKENS + seed)
        for seed, length in enumerate(PROMPTS)
    ]


def _fail_at(rig: Rig, monkeypatch: pytest.MonkeyPatch, turn: int) -> list[int]:
    """Let one observation fail; returns a list that has an entry for each one made."""
    turns: list[int] = []
    observe = rig.proposer.observe

    def failing(observation: object) -> None:
        turns.append(len(turns))
        if turns[-1] == turn:
            raise torch.OutOfMemoryError("no room for the draft")
        observe(observation)  # type: ignore[arg-type]

    monkeypatch.setattr(rig.proposer, "observe", failing)
    return turns


def _run(rig: Rig, requests: Sequence[RequestInput]) -> tuple[dict[str, list[RequestDelta]], int]:
    """Run requests to their ends, whatever is raised; returns their deltas and the faults."""
    deltas: dict[str, list[RequestDelta]] = {request.request_id: [] for request in requests}
    num_faults = 0
    for request in requests:
        rig.engine.add_request(request)
    while rig.engine.has_work:
        try:
            for delta in rig.engine.step():
                deltas[delta.request_id].append(delta)
        except torch.OutOfMemoryError:
            num_faults += 1
        rig.engine.check()
        assert rig.engine.num_steps < 100, "a request does not end"
    return deltas, num_faults


@pytest.mark.parametrize("turn", range(0, 12))
def test_what_a_round_committed_is_delivered_before_its_fault(
    world: World, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    """Prefills, chunks, rounds and last rounds; who steps on gets the same tokens."""
    expected = drive(make_rig(world, GIVEN), _requests())
    rig = make_rig(world, GIVEN)
    turns = _fail_at(rig, monkeypatch, turn)
    deltas, num_faults = _run(rig, _requests())
    assert num_faults == (turn < len(turns)) == 1
    for name, parts in deltas.items():
        ids = [token for delta in parts for token in delta.ids_target]
        assert tuple(ids) == expected[name].ids_target
        assert "".join(delta.text for delta in parts) == expected[name].text
        assert [delta.finish_reason for delta in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason == expected[name].finish_reason
        assert parts[-1].usage.num_output_tokens == len(ids)


def test_a_parked_request_is_not_handed_over_without_its_draft(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(world, GIVEN)
    _fail_at(rig, monkeypatch, 0)
    request = prefill_request(0, 9, max_tokens=1, is_parked_at_end=True)
    rig.engine.add_request(request)
    with pytest.raises(torch.OutOfMemoryError):
        rig.engine.step()
    assert rig.engine.stats().finished == {}
    assert rig.engine.abort(request.request_id)
    rig.engine.check()
