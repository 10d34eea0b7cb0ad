"""What the host launches when it notes the prompts of a prefill for whoever drafts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from runtime.engine import roster
from runtime.engine.round import Round, tell_proposer
from runtime.spec.oracle import OracleScript
from runtime.spec.types import Proposer
from tests.engine_harness import World
from tests.fake_graph import ids_of, make_agreeing_world, make_llm
from tests.launches import counted_launches
from tests.prefill_cases import GAMMA, crowd, prefill_request

LENGTHS = (7, 3, 11, 7, 20, 1, 9, 16)
PACKED = (160,)  # rows of a prefill that holds all of them


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_agreeing_world(tmp_path_factory.mktemp("notes"))


def launches_of_notes(world: World, kind: str, count: int) -> Counter[str]:
    """Prefill so many prompts at once; return what telling the proposer of them launched."""
    requests = [
        prefill_request(seed, length, max_tokens=20) for seed, length in enumerate(LENGTHS[:count])
    ]
    script = OracleScript(
        continuations={tuple(item.prompt_ids_target): (7,) * 30 for item in requests},
        corruption_rates=(0.4,),
    )
    llm, (graph,) = make_llm(
        world,
        proposer=kind,
        num_speculative_tokens=GAMMA,
        script=script if kind == "oracle" else None,
        max_num_requests=8,
        prefill_buckets=PACKED,
    )
    launches: Counter[str] = Counter()

    def told(proposer: Proposer, done: Round) -> None:
        with counted_launches() as counts:
            tell_proposer(proposer, done)
        launches.update(counts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roster, "tell_proposer", told)
        for request in requests:
            llm.engine.add_request(request)
        deltas = llm.engine.step()
    assert len(deltas) == count
    assert (graph.num_prefills, len(graph.prefills)) == (1, count)
    return launches


@pytest.mark.parametrize(("kind", "most"), [("oracle", 6), ("ngram", 3), ("eagle3", 0)])
def test_what_notes_launch_follows_no_number_of_prompts(world: World, kind: str, most: int) -> None:
    alone, together = (launches_of_notes(world, kind, count) for count in (1, len(LENGTHS)))
    assert together == alone
    assert alone.total() <= most


def test_the_oracle_accepts_the_same_after_prefills_on_the_device(world: World) -> None:
    plain, _ = make_llm(world, is_eager=True, proposer="none")
    requests = crowd(8)
    longer = [replace(item, max_tokens=9 + GAMMA + 1) for item in requests]
    answers = ids_of(plain.generate(longer))
    script = OracleScript(
        continuations={tuple(item.prompt_ids_target): answers[item.request_id] for item in longer},
        corruption_rates=(0.4,),
    )
    settings: dict[str, Any] = {
        "proposer": "oracle",
        "num_speculative_tokens": GAMMA,
        "script": script,
    }
    eager, _ = make_llm(world, prefill_buckets=(), **settings)
    device, (graph,) = make_llm(world, prefill_buckets=PACKED, **settings)
    found = ids_of(device.generate(requests))
    assert found == ids_of(eager.generate(requests))
    assert found == {name: ids[:9] for name, ids in answers.items()}
    stats = device.engine.stats()
    assert stats.num_accepted_at == eager.engine.stats().num_accepted_at
    assert sum(stats.num_accepted_at) > 0
    assert 0 < graph.num_prefills < len(graph.prefills) == len(requests)
