"""Prefills on the device beside eager ones, on CPUs and GPUs: worlds, prompts, what they leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from runtime.spec.types import SamplingParams
from tests.engine_harness import World, kv_rows, prompt_of
from tests.fake_graph import FakeGraph, ids_of, make_agreeing_world, make_llm
from tests.tiny_block import BlockCase, make_block_world
from tests.tiny_last_state import last_state_world
from tests.tiny_parallel import parallel_world

KINDS = ("none", "ngram", "eagle3", "mtp", "eagle", "peagle", "dspark", "dflash")


GAMMA = 3

SAMPLED = SamplingParams(temperature=0.8, seed=2**40 + 3, choice_index=2)
FILTERED = SamplingParams(temperature=1.3, seed=7, top_k=9, top_p=0.8, min_p=0.01)


class PrefillCase:
    """A world and the proposer that runs over it."""

    def __init__(self, kind: str, world: World) -> None:
        """Take both."""
        self.kind, self.world = kind, world

    def pair(self, **settings: object) -> tuple[LLM, LLM, FakeGraph]:
        """Return an engine with eager prefills and one with prefills of fixed sizes."""
        settings = {
            "proposer": self.kind,
            "num_speculative_tokens": 0 if self.kind == "none" else GAMMA,
            "max_num_requests": 2,
            **settings,
        }
        eager, (plain,) = make_llm(self.world, **(settings | {"prefill_buckets": ()}))
        assert plain.prefill_shapes == ()
        device, (graph,) = make_llm(self.world, **settings)
        return eager, device, graph


def prompts_of(graph: FakeGraph) -> list[tuple[int, int, int]]:
    """Return rows of the graph, first position and rows of each prompt that ran on the device."""
    return [(shape.num_rows, start, count) for shape, start, count in graph.prefills]


def prefill_world(folder: Path, kind: str) -> World:
    """Return a target with a draft of this kind, or with a draft that nobody asks for."""
    if kind in ("mtp", "eagle"):
        return last_state_world(folder, "mtp" if kind == "mtp" else "eagle")
    if kind == "peagle":
        return parallel_world(folder)
    if kind == "dspark":
        return make_block_world(folder, BlockCase(markov="rnn", sliding_window=12))
    if kind == "dflash":
        return make_block_world(folder, BlockCase(markov=None))
    return make_agreeing_world(folder)


def prefill_request(seed: int, length: int, **fields: object) -> RequestInput:
    given = RequestInput(
        request_id=f"r{seed}-{length}",
        prompt_ids_target=prompt_of(seed, length),
        max_tokens=9,
        ignore_eos=True,
    )
    return replace(given, **fields)  # type: ignore[arg-type]


def one_by_one(llm: LLM, requests: Sequence[RequestInput]) -> dict[str, tuple[int, ...]]:
    """Run requests one after the other, so that every prompt is alone in its step."""
    return ids_of([llm.generate([request])[0] for request in requests])


def after_prefill(llm: LLM, request: RequestInput) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """Return the first token and every bit that a prefill leaves for the rounds after it."""
    llm.engine.add_request(request)
    engine = llm.own_engine
    (delta,) = engine.step()
    kept = left_by(llm, request)
    assert llm.engine.abort(request.request_id)
    llm.engine.check()
    return delta.ids_target, kept


def left_by(llm: LLM, request: RequestInput) -> list[torch.Tensor]:
    """Return every bit that a prefill left for the rounds after it."""
    engine = llm.own_engine
    found = engine.find(request.request_id)
    assert found is not None
    assert llm.caches is not None
    blocks, count = found.placed.table.blocks, len(request.prompt_ids_target)
    kept = [kv_rows(layer, blocks, count) for layer in llm.caches.pool.layers]
    kept += engine._proposer.export_slot(found.placed.slot).values()
    return kept


def check_one_prefill(
    eager: LLM,
    device: LLM,
    lengths: Sequence[int],
    laws: Sequence[SamplingParams] = (SamplingParams(),),
) -> None:
    """Check that prompts which come at once leave what each of them leaves alone and eagerly."""
    requests = [
        prefill_request(seed, length, max_tokens=30, params=laws[seed % len(laws)])
        for seed, length in enumerate(lengths)
    ]
    alone = [after_prefill(eager, request) for request in requests]
    for request in requests:
        device.engine.add_request(request)
    got: dict[str, tuple[int, ...]] = {}
    while len(got) < len(requests):
        got |= {delta.request_id: delta.ids_target for delta in device.engine.step()}
    for request, (ids, states) in zip(requests, alone, strict=True):
        assert got[request.request_id][0] == ids[0]
        found = left_by(device, request)
        assert len(found) == len(states) > 0
        for one, other in zip(found, states, strict=True):
            assert torch.equal(one, other), f"prompt of {len(request.prompt_ids_target)}"
    for request in requests:
        device.engine.abort(request.request_id)
    device.engine.check()


def crowd(count: int) -> list[RequestInput]:
    """Return prompts of several lengths, some with the same beginnings."""
    shared = prompt_of(3, 32)
    return [
        prefill_request(i, 5 + 7 * i, prompt_ids_target=(*shared[: 16 * (i % 3)], *prompt_of(i, 9)))
        for i in range(count)
    ]
