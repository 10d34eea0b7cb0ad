"""Ranks in step: what comes from outside reaches all of them, a rank that differs is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from runtime.config import resolve_config
from runtime.engine.engine import Engine
from runtime.engine.lockstep import EngineOrder, Lockstep, LockstepLeader, follow
from runtime.engine.request import RequestDelta, RequestInput
from runtime.parallel.ranks import Ranks
from runtime.spec.oracle import OracleScript
from runtime.spec.types import SamplingParams
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import Manifest
from specctl.ops.emit_manifest import emit_manifest
from tests.engine_harness import prompt_of
from tests.rank_harness import SMALL, builder, on_rank_pairs
from tests.tiny import write_tiny_target
from tests.tiny_agreeing import write_agreeing_eagle3

Delivered = dict[str, list[int]]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    directory: Path = tmp_path_factory.mktemp("lockstep")
    target = write_tiny_target(directory / "t", layer_gain=0.15)
    draft = write_agreeing_eagle3(directory / "d", target)
    return emit_manifest(str(target), str(draft), num_speculative_tokens=3)


def request(name: str, length: int, params: SamplingParams, **given: object) -> RequestInput:
    wish = RequestInput(
        request_id=name,
        prompt_ids_target=prompt_of(length, length),
        params=params,
        max_tokens=20,
        ignore_eos=True,
    )
    return replace(wish, **given)  # type: ignore[arg-type]


class Noted(Engine):
    """An engine that keeps what it delivered; a rank may be made to lie about a token."""

    delivered: Delivered
    liar = False

    def step(self) -> tuple[RequestDelta, ...]:
        deltas = super().step()
        for delta in deltas:
            self.delivered.setdefault(delta.request_id, []).extend(delta.ids_target)
        if self.liar:
            return tuple(structs.replace(delta, ids_target=(1,)) for delta in deltas)
        return deltas


def noted(engine: Engine, *, liar: bool = False) -> Noted:
    engine.__class__ = Noted
    assert isinstance(engine, Noted)
    engine.delivered, engine.liar = {}, liar
    return engine


def drive(leader: LockstepLeader) -> None:
    """Requests that arrive late, one that is dropped, one that is refused, a flush, idle time."""
    sampled = SamplingParams(temperature=1.0)
    leader.add_request(request("early", 9, SamplingParams()))
    admission = leader.add_request(request("unseeded", 5, sampled, has_seed=False))
    assert admission.seed != 0, "a seed is drawn before the others hear of the request"
    leader.step()
    with pytest.raises(DiagnosticError, match="SD908"):
        leader.add_request(request("empty", 0, sampled, prompt_ids_target=()))
    leader.add_request(request("late", 20, replace(sampled, seed=5, logit_bias=((7, 1.5),))))
    leader.add_request(request("dropped", 30, SamplingParams()))
    for _ in range(3):
        leader.step()
    assert leader.abort("dropped")
    assert not leader.abort("dropped")
    while leader.has_work:
        leader.step()
    leader.flush_cache()
    leader.add_request(request("again", 9, SamplingParams()))
    while leader.has_work:
        leader.step()
    leader.check()


def lead_or_follow(
    manifest: Manifest,
    ranks: Ranks,
    control: Ranks,
    script: Callable[[LockstepLeader], None],
    *,
    liar: int | None = None,
) -> tuple[Delivered, object]:
    build = builder(manifest, ranks)
    built: list[Noted] = []

    def build_noted(order: EngineOrder) -> Engine:
        built.append(noted(build(order), liar=ranks.rank == liar))
        return built[-1]

    if ranks.rank == 0:
        lockstep = Lockstep(control)
        leader = lockstep.open(EngineOrder(config=resolve_config(manifest, SMALL)), build_noted)
        script(leader)
        lockstep.close()
    else:
        follow(control, build_noted)
    built[0].check()
    return built[0].delivered, built[0].stats()


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_hears_what_the_first_is_told(manifest: Manifest, size: int) -> None:
    results = on_rank_pairs(
        size, lambda ranks, control: lead_or_follow(manifest, ranks, control, drive)
    )
    delivered = results[0][0]
    assert {name: len(ids) for name, ids in delivered.items() if name != "dropped"} == {
        "early": 20,
        "unseeded": 20,
        "late": 20,
        "again": 20,
    }
    assert delivered["again"] == delivered["early"], "a flush changes no token"
    for other in results:
        assert other == results[0]


def test_a_rank_that_commits_another_id_is_named(manifest: Manifest) -> None:
    def lead(leader: LockstepLeader) -> None:
        leader.add_request(request("one", 9, SamplingParams()))
        while leader.has_work:
            leader.step()

    def work(ranks: Ranks, control: Ranks) -> str:
        with pytest.raises(DiagnosticError) as caught:
            lead_or_follow(manifest, ranks, control, lead, liar=1)
        return str(caught.value)

    for text in on_rank_pairs(2, work):
        assert "SD859" in text
        assert "rank 1 committed other ids than rank 0" in text


def test_engines_are_opened_on_every_rank_and_take_turns(manifest: Manifest) -> None:
    """A target-only engine and one with a script, beside the first, over the same weights."""
    wish = request("one", 9, SamplingParams())
    config = resolve_config(manifest, SMALL)
    alone = replace(config, proposer="none", num_speculative_tokens=0, draft_width=0)
    scripted = replace(config, proposer="oracle", draft_width=0)

    def work(ranks: Ranks, control: Ranks) -> list[Delivered]:
        build = builder(manifest, ranks)
        built: list[Noted] = []

        def build_noted(order: EngineOrder) -> Engine:
            built.append(noted(build(order)))
            return built[-1]

        if ranks.rank:
            follow(control, build_noted)
            return [engine.delivered for engine in built]
        lockstep = Lockstep(control)
        first = lockstep.open(EngineOrder(config=config), build_noted)
        second = lockstep.open(EngineOrder(config=alone), build_noted)
        for leader in (first, second):
            leader.add_request(wish)
        while first.has_work or second.has_work:
            for leader in (second, first):
                if leader.has_work:
                    leader.step()
        second.close()
        answers = {wish.prompt_ids_target: tuple(built[0].delivered["one"])}
        script = OracleScript(continuations=answers, corruption_rates=(0.25,), seed=3)
        third = lockstep.open(EngineOrder(config=scripted, script=script), build_noted)
        third.add_request(wish)
        while third.has_work:
            third.step()
        lockstep.close()
        return [engine.delivered for engine in built]

    results = on_rank_pairs(2, work)
    assert results[0] == results[1]
    assert len(results[0]) == 3
    assert all(delivered == results[0][0] for delivered in results[0])
