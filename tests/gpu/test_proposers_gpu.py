"""Captured rounds of every proposer equal eager ones on CUDA: tokens, counts, acceptance.

`pytest -m gpu tests/gpu/test_proposers_gpu.py`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.engine.request import RequestInput
from runtime.spec.oracle import OracleScript
from runtime.spec.types import DeviceProposer, SamplingParams
from tests.engine_harness import World, make_world, prompt_of
from tests.fake_graph import ids_of, make_agreeing_world, make_llm
from tests.tiny_block import BlockCase, make_block_world
from tests.tiny_last_state import last_state_world
from tests.tiny_manifest import load_tiny
from tests.tiny_parallel import parallel_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda", 0)
GAMMA = 4
BLOCKS: Mapping[str, BlockCase] = {
    "dspark": BlockCase(),
    "dspark-gated": BlockCase(markov="gated", draft_vocab_size=None),
    "dspark-rnn-slot-0-silent": BlockCase(
        markov="rnn", sample_from_anchor=False, sliding_window=12
    ),
    "dflash": BlockCase(markov=None, sample_from_anchor=False),
    "dflash2": BlockCase(
        markov=None, has_selector=True, sample_from_anchor=False, draft_vocab_size=None
    ),
}
KINDS = ("eagle", "eagle3", "peagle", "mtp", "mtp-layers", *BLOCKS)
REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(index, 1 + 5 * index),
        max_tokens=20 + 3 * index,
        ignore_eos=True,
        num_speculative_tokens=GAMMA - index % 3,
    )
    for index in range(8)
)


def world_of(kind: str, folder: Path) -> World:
    """Return a tiny pair in bfloat16 on the device."""
    if kind in BLOCKS:
        made = make_block_world(folder, BLOCKS[kind])
    elif kind == "eagle3":
        return make_agreeing_world(folder, device=CUDA, dtype=torch.bfloat16)
    elif kind == "peagle":
        made = parallel_world(folder)
    else:
        name, _, layers = kind.partition("-")
        made = last_state_world(
            folder, "mtp" if name == "mtp" else "eagle", num_layers=4 if layers else 1
        )
    return replace(made, models=load_tiny(made.manifest, device=CUDA, dtype=torch.bfloat16))


@pytest.fixture(scope="module", params=KINDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_of(request.param, tmp_path_factory.mktemp("proposers-gpu"))


def assert_equal_rounds(world: World, proposer: str, script: OracleScript | None) -> None:
    settings = {"proposer": proposer, "num_speculative_tokens": GAMMA, "max_num_requests": 3}
    eager, _ = make_llm(world, is_eager=True, graphs="off", script=script, **settings)
    captured, _ = make_llm(world, is_eager=True, graphs="auto", script=script, **settings)
    assert isinstance(captured.engine._proposer, DeviceProposer)
    assert captured.engine.graph_report.num_graphs > 0
    expected, found = eager.generate(REQUESTS), captured.generate(REQUESTS)
    assert ids_of(found) == ids_of(expected)
    stats, others = captured.engine.stats(), eager.engine.stats()
    assert stats.num_device_rounds > 0.5 * stats.num_steps
    if script is None:  # a script beyond its end has no drafts eagerly, wrong ones on the device
        assert [answer.usage for answer in found] == [answer.usage for answer in expected]
        assert stats.num_accepted_at == others.num_accepted_at


def algorithm_of(world: World) -> str:
    assert world.manifest.draft is not None
    return world.manifest.draft.algorithm


def test_captured_rounds_equal_eager_ones(world: World) -> None:
    assert_equal_rounds(world, algorithm_of(world), None)


def test_seeded_requests_draft_alike(world: World) -> None:
    settings = {"proposer": algorithm_of(world), "num_speculative_tokens": GAMMA}
    requests = [
        replace(request, params=SamplingParams(temperature=0.3 * (index % 4), seed=index))
        for index, request in enumerate(REQUESTS)
    ]
    eager, _ = make_llm(world, is_eager=True, graphs="off", max_num_requests=3, **settings)
    captured, _ = make_llm(world, is_eager=True, graphs="auto", max_num_requests=3, **settings)
    expected, found = eager.generate(requests), captured.generate(requests)
    assert ids_of(found) == ids_of(expected)
    assert [answer.usage for answer in found] == [answer.usage for answer in expected]
    assert captured.engine.stats().num_device_rounds > 0


def answers_of(world: World, *, extra: int = GAMMA + 1) -> dict[str, tuple[int, ...]]:
    """Return the target's own answers, a round longer than asked for."""
    plain, _ = make_llm(world, is_eager=True, graphs="off", proposer="none")
    longer = [
        replace(
            request,
            max_tokens=(request.max_tokens or 0) + extra,
            num_speculative_tokens=None,
        )
        for request in REQUESTS
    ]
    return ids_of(plain.generate(longer))


@pytest.mark.parametrize(
    "rules",
    [{"accept_counts": (0, 1, 2, 3, 4)}, {"replacement_rate": 0.6, "corruption_rates": (0.2,)}],
)
def test_replaced_ids_change_no_token(world: World, rules: dict[str, tuple[int, ...]]) -> None:
    answers = answers_of(world)
    script = OracleScript(continuations=dict(answers), seed=5, **rules)
    assert_equal_rounds(world, algorithm_of(world), script)
    llm, _ = make_llm(
        world,
        is_eager=True,
        graphs="auto",
        script=script,
        proposer=algorithm_of(world),
        num_speculative_tokens=GAMMA,
    )
    for answer in llm.generate(REQUESTS):
        assert answers[answer.request_id][: len(answer.ids_target)] == answer.ids_target
    counts = llm.engine.stats().num_accepted_at
    assert min(counts) > 0, "every depth is accepted now and then"
    assert counts[-1] < counts[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "rules", [{}, {"accept_counts": (2, 0, 4, 1)}, {"corruption_rates": (0.1, 0.3)}]
)
def test_the_oracle_in_captured_rounds(
    dtype: str, rules: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    world = make_world(tmp_path, device=CUDA, dtype=getattr(torch, dtype))
    answers = answers_of(world)
    script = OracleScript(continuations=dict(answers), seed=7, **rules)
    assert_equal_rounds(world, "oracle", script)
