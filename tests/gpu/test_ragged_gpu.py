"""Ragged rounds and chosen draft counts on CUDA, captured: the tokens of target-only decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config.cost_table import load_costs
from runtime.config.round_sizes import RoundMenu, draft_counts_up_to
from runtime.engine.build import build_engine
from runtime.engine.caches import make_caches
from runtime.engine.costs import CostPlace, measured_on
from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from runtime.spec.oracle import OracleScript
from tests.engine_harness import World, prompt_of
from tests.fake_graph import ids_of, make_agreeing_world, make_llm
from tests.linear_costs import linear_costs
from tests.tiny_block import BlockCase, make_block_world
from tests.tiny_last_state import last_state_world
from tests.tiny_parallel import parallel_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
GAMMA = 8
MENU = RoundMenu(batches=(1, 2, 4), draft_counts=draft_counts_up_to(GAMMA))
REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(60 + index, 3 + 4 * index),
        max_tokens=30 + index,
        ignore_eos=True,
    )
    for index in range(8)
)


def _world(kind: str, folder: Path) -> World:
    dtype = torch.bfloat16
    if kind == "dspark":
        return make_block_world(folder, BlockCase(block_size=GAMMA), device=CUDA, dtype=dtype)
    if kind == "mtp":
        return last_state_world(folder, "mtp", device=CUDA, dtype=dtype)
    if kind == "peagle":
        return parallel_world(folder, device=CUDA, dtype=dtype)
    return make_agreeing_world(folder, device=CUDA, dtype=dtype)


@pytest.fixture(scope="module", params=["eagle3", "mtp", "peagle", "dspark"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    return _world(request.param, tmp_path_factory.mktemp(request.param))


def _llm(world: World, **settings: Any) -> LLM:
    assert world.manifest.draft is not None
    given = {"proposer": world.manifest.draft.algorithm, "num_speculative_tokens": GAMMA}
    # On CUDA `is_eager` leaves the choice between graphs and kernels to `graphs`.
    return make_llm(world, is_eager=True, **(given | settings))[0]


def _plain(world: World) -> dict[str, tuple[int, ...]]:
    llm, _ = make_llm(world, is_eager=True, proposer="none", graphs="off")
    return ids_of(llm.generate(REQUESTS))


def test_own_numbers_and_chosen_ones_keep_the_tokens(world: World) -> None:
    expected = _plain(world)
    own = [
        replace(request, num_speculative_tokens=1 + 5 * index % GAMMA)
        for index, request in enumerate(REQUESTS)
    ]
    assert ids_of(_llm(world).generate(own)) == expected
    for mode in ("compact", "cap-accept"):
        for draft_s, row_s in ((0.02, 0.03), (0.0, 0.0), (0.3, 0.0)):
            costs = linear_costs(MENU, draft_s=draft_s, row_s=row_s)
            llm = _llm(world, length_mode=mode, costs=costs)
            assert ids_of(llm.generate(REQUESTS)) == expected, (mode, draft_s, row_s)
            assert llm.engine.stats().num_device_rounds > 0


@pytest.mark.parametrize("counts", [(0,), (GAMMA,), (GAMMA, 0), (1, 3, 0, 7, 2, 8)])
def test_acceptance_that_turns(
    tmp_path_factory: pytest.TempPathFactory, counts: tuple[int, ...]
) -> None:
    world = _world("eagle3", tmp_path_factory.mktemp("turns"))
    expected = _plain(world)
    llm = _llm(
        world,
        proposer="oracle",
        length_mode="compact",
        script=OracleScript(continuations=dict(expected), accept_counts=counts),
    )
    assert ids_of(llm.generate(REQUESTS)) == expected


def test_costs_of_captured_rounds(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    world = _world("eagle3", tmp_path_factory.mktemp("costs"))
    config = replace(_llm(world).config, length_mode="compact")
    place = CostPlace(path=tmp_path / "m.costs.json", fingerprint=world.manifest.fingerprint)
    caches = make_caches(world.models, config)
    engine = build_engine(world.models, config, costs=place, caches=caches)
    what = measured_on(config, place.fingerprint, is_captured=True)
    table = load_costs(place.path, what)
    assert table is not None
    assert all(1e-6 < seconds < 1 for seconds in table.verify_s.values())
    assert all(1e-6 < seconds < 1 for seconds in table.draft_s.values())
    llm = LLM(
        engine=engine,
        caches=caches,
        models=world.models,
        manifest=world.manifest,
        tokenizer=None,
        diagnostics=(),
    )
    assert ids_of(llm.generate(REQUESTS)) == _plain(world)
