"""Ladder step 7: chunk budgets, preemption and prefix hits change no token; faults stay local."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from runtime.config import Overrides
from runtime.engine.request import RequestInput
from runtime.spec.ngram import NgramProposer
from runtime.spec.oracle import OracleScript
from runtime.spec.types import Proposal, RequestView, SamplingParams
from specctl.contract.diagnostics import DiagnosticError, diagnose
from tests.engine_harness import World, drive, make_rig, prompt_of, reference_ids

REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(50 + index, 17 + 6 * index),
        params=SamplingParams(temperature=0.8 * (index % 2), seed=index),
        max_tokens=20,
        ignore_eos=True,
    )
    for index in range(4)
)


@pytest.fixture(scope="session")
def answers(world: World) -> dict[str, tuple[int, ...]]:
    return {request.request_id: reference_ids(world, request) for request in REQUESTS}


def _ids(found: dict[str, object]) -> dict[str, tuple[int, ...]]:
    return {name: answer.ids_target for name, answer in found.items()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("budget", [5, 16, 512])
@pytest.mark.parametrize("num_kv_blocks", [10, 80])
@pytest.mark.parametrize("has_cache", [True, False])
def test_budget_preemption_and_prefix_do_not_change_tokens(
    world: World,
    answers: dict[str, tuple[int, ...]],
    budget: int,
    num_kv_blocks: int,
    has_cache: bool,
) -> None:
    rig = make_rig(
        world,
        Overrides(
            proposer="eagle3",
            num_speculative_tokens=3,
            max_num_batched_tokens=budget,
            num_kv_blocks=num_kv_blocks,
            max_model_len=64,
            enable_prefix_cache=has_cache,
        ),
    )
    first = drive(rig, REQUESTS, arrivals={1: 1, 2: 2, 3: 5})
    assert _ids(first) == answers
    again = [drive(rig, REQUESTS[1:2])["r1"] for _ in range(2)]
    assert {answer.ids_target for answer in again} == {answers["r1"]}
    assert again[1].usage.num_cached_tokens == (16 if has_cache else 0)
    stats = rig.engine.stats()
    assert stats.num_free_kv_blocks == stats.num_kv_blocks == num_kv_blocks - 1
    if num_kv_blocks == 10:
        assert stats.num_preemptions > 0
    if num_kv_blocks == 80:
        assert stats.num_preemptions == 0


@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("num_steps", [1, 3, 5, 8, 12])
def test_preemption_at_five_points_is_exact(
    world: World, answers: dict[str, tuple[int, ...]], num_steps: int, has_cache: bool
) -> None:
    """Once while its prompt is half computed, then after ever more rounds."""
    rig = make_rig(
        world,
        Overrides(
            proposer="oracle",
            num_speculative_tokens=2,
            prefill_chunk_size=10,
            enable_prefix_cache=has_cache,
        ),
        script=OracleScript(continuations=dict(answers), corruption_rates=(0.5,)),
    )
    for request in REQUESTS[:2]:
        rig.engine.add_request(request)
    ids: dict[str, list[int]] = {"r0": [], "r1": []}
    step = 0
    while rig.engine.has_work:
        if step == num_steps:
            victim = rig.engine._scheduler.running[-1]
            assert victim.request_id == "r1"
            rig.engine._scheduler.preempt(victim)
        for delta in rig.engine.step():
            ids[delta.request_id].extend(delta.ids_target)
        rig.engine.check()
        step += 1
    assert {name: tuple(found) for name, found in ids.items()} == {
        name: answers[name] for name in ("r0", "r1")
    }
    assert rig.engine.stats().num_preemptions == 1


def test_a_prefix_hit_gives_the_same_drafts_as_a_miss(world: World) -> None:
    """The draft's KV of cached blocks is the one that the same prompt would compute again."""
    rig = make_rig(world, Overrides(proposer="eagle3", num_speculative_tokens=3))
    request = replace(REQUESTS[3], max_tokens=8)
    drive(rig, [request])
    missed, num_rows = list(rig.proposer.proposals), rig.engine.stats().num_rows
    rig.proposer.proposals.clear()
    hit = drive(rig, [request])[request.request_id]
    assert hit.usage.num_cached_tokens == 32
    assert rig.engine.stats().num_rows == 2 * num_rows - 32
    assert rig.proposer.proposals == missed


def test_a_prefix_that_differs_only_after_a_block_is_no_hit_for_a_draft(world: World) -> None:
    """EAGLE-3 KV at a block's last position depends on the token after the block."""
    prompt = prompt_of(9, 17)
    other = (*prompt[:16], prompt[16] + 1 if prompt[16] < 90 else 3)
    wish = replace(REQUESTS[0], prompt_ids_target=prompt, max_tokens=1)
    for proposer, hits in (("eagle3", 8), ("ngram", 16)):
        rig = make_rig(world, Overrides(proposer=proposer))
        drive(rig, [wish])
        found = drive(rig, [replace(wish, prompt_ids_target=other)])["r0"]
        assert found.usage.num_cached_tokens == hits


def test_flush_forgets_prefixes_and_counters_and_lets_requests_go_on(
    world: World, answers: dict[str, tuple[int, ...]]
) -> None:
    rig = make_rig(world, Overrides(proposer="eagle3"))
    drive(rig, REQUESTS[:1])
    rig.engine.add_request(REQUESTS[1])
    ids = [token for _ in range(3) for delta in rig.engine.step() for token in delta.ids_target]
    rig.engine.flush_cache()
    assert rig.engine.stats().num_cached_kv_blocks == 0
    assert rig.engine.stats().num_rounds == 0
    while rig.engine.has_work:
        ids.extend(token for delta in rig.engine.step() for token in delta.ids_target)
        rig.engine.check()
    assert tuple(ids) == answers["r1"]
    assert drive(rig, REQUESTS[:1])["r0"].usage.num_cached_tokens == 0


def test_abort_in_flight_leaves_nothing_behind(
    world: World, answers: dict[str, tuple[int, ...]]
) -> None:
    rig = make_rig(world, Overrides(proposer="eagle3", max_num_requests=2))
    for request in REQUESTS:
        rig.engine.add_request(request)
    rig.engine.step()
    rig.engine.step()
    assert (rig.engine.stats().num_running, rig.engine.stats().num_waiting) == (2, 2)
    assert all(rig.engine.abort(request.request_id) for request in REQUESTS)
    assert not rig.engine.abort("r0")
    stats = rig.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    assert stats.finished == {"abort": 4}
    assert not rig.engine.has_work
    assert rig.engine.step() == ()
    rig.engine.check()
    assert _ids(drive(rig, REQUESTS)) == answers


def test_a_full_queue_refuses(world: World) -> None:
    rig = make_rig(world, Overrides(proposer="none", max_num_requests=1, max_num_waiting=1))
    rig.engine.add_request(REQUESTS[0])
    rig.engine.add_request(REQUESTS[1])
    with pytest.raises(DiagnosticError) as refused:
        rig.engine.add_request(REQUESTS[2])
    assert [found.code for found in refused.value.diagnostics] == ["SD914"]
    with pytest.raises(DiagnosticError, match="SD904"):
        rig.engine.add_request(REQUESTS[1])


class _Faulty(NgramProposer):
    """Fails on one request, or altogether."""

    def __init__(self, where: str, device: object) -> None:
        super().__init__(device=device)  # type: ignore[arg-type]
        self._where = where
        self.is_armed = True

    def propose(self, views: Sequence[RequestView]) -> Proposal:
        places = {f"request={view.request_id}" for view in views}
        if self.is_armed and (self._where in places or self._where == "engine"):
            raise DiagnosticError(diagnose("SD916", where=self._where, message="it broke"))
        return super().propose(views)


def test_a_fault_of_one_request_ends_that_request_alone(
    world: World, answers: dict[str, tuple[int, ...]]
) -> None:
    rig = make_rig(
        world,
        Overrides(proposer="ngram"),
        proposer=_Faulty("request=r1", world.models.target.device),
    )
    found = drive(rig, REQUESTS)
    assert found["r1"].finish_reason == "error"
    assert {name: answer.ids_target for name, answer in found.items() if name != "r1"} == {
        name: ids for name, ids in answers.items() if name != "r1"
    }
    assert rig.engine.stats().finished == {"error": 1, "length": 3}


def test_a_fault_of_nobody_is_raised_and_changes_no_request(
    world: World, answers: dict[str, tuple[int, ...]]
) -> None:
    faulty = _Faulty("engine", world.models.target.device)
    rig = make_rig(world, Overrides(proposer="ngram"), proposer=faulty)
    rig.engine.add_request(REQUESTS[0])
    ids = [token for delta in rig.engine.step() for token in delta.ids_target]
    with pytest.raises(DiagnosticError, match="it broke"):
        rig.engine.step()
    faulty.is_armed = False
    while rig.engine.has_work:
        ids.extend(token for delta in rig.engine.step() for token in delta.ids_target)
    assert tuple(ids) == answers["r0"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"prompt_ids_target": ()}, "SD908"),
        ({"prompt_ids_target": (3,) * 128}, "SD909"),
        ({"prompt_ids_target": (3, 104)}, "SD910"),
        ({"stop_ids": (-1,)}, "SD910"),
        ({"max_tokens": 0}, "SD904"),
        ({"stop": ("",)}, "SD904"),
        ({"num_speculative_tokens": 5}, "SD904"),
        ({"params": SamplingParams(temperature=float("nan"))}, "SD904"),
        ({"params": SamplingParams(top_p=0.0)}, "SD904"),
        ({"params": SamplingParams(seed=2**63)}, "SD904"),
        ({"params": SamplingParams(min_p=1.5)}, "SD904"),
        ({"params": SamplingParams(top_k=-1)}, "SD904"),
        # Beyond 64 bits a device tensor, or a message to another rank, would fail for everyone.
        ({"params": SamplingParams(top_k=2**63)}, "SD904"),
        ({"params": SamplingParams(min_tokens=2**64)}, "SD904"),
        ({"max_tokens": 2**64}, "SD904"),
        ({"params": SamplingParams(repetition_penalty=0.0)}, "SD904"),
        ({"params": SamplingParams(presence_penalty=float("inf"))}, "SD904"),
        ({"params": SamplingParams(logit_bias=((3, float("nan")),))}, "SD904"),
        ({"params": SamplingParams(logit_bias=((500, 1.0),))}, "SD910"),
        ({"params": SamplingParams(min_tokens=-1)}, "SD904"),
    ],
)
def test_a_request_that_cannot_run_is_refused_with_its_field(
    world: World, changes: dict[str, object], code: str
) -> None:
    rig = make_rig(world, Overrides(proposer="eagle3"))
    with pytest.raises(DiagnosticError) as refused:
        rig.engine.add_request(replace(REQUESTS[0], **changes))  # type: ignore[arg-type]
    assert [found.code for found in refused.value.diagnostics] == [code]
    assert refused.value.diagnostics[0].where == "request=r0"
    assert not rig.engine.has_work


def test_stop_strings_need_a_tokenizer(world: World) -> None:
    rig = make_rig(world, Overrides(proposer="none"), with_tokenizer=False)
    with pytest.raises(DiagnosticError, match="SD911"):
        rig.engine.add_request(replace(REQUESTS[0], stop=("x",)))
    answer = drive(rig, [replace(REQUESTS[0], max_tokens=2)])["r0"]
    assert (answer.text, len(answer.ids_target)) == ("", 2)
