"""Prefills on the device beside eager ones, on CPUs and GPUs: worlds, prompts, what they leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from tests.engine_harness import World, kv_rows, prompt_of
from tests.fake_graph import ids_of, make_agreeing_world
from tests.tiny_block import BlockCase, make_block_world
from tests.tiny_last_state import last_state_world
from tests.tiny_parallel import parallel_world

KINDS = ("none", "ngram", "eagle3", "mtp", "eagle", "peagle", "dspark", "dflash")


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
    found = engine.find(request.request_id)
    assert found is not None
    assert llm.caches is not None
    blocks, count = found.placed.table.blocks, len(request.prompt_ids_target)
    kept = [kv_rows(layer, blocks, count) for layer in llm.caches.pool.layers]
    kept += engine._proposer.export_slot(found.placed.slot).values()
    assert llm.engine.abort(request.request_id)
    llm.engine.check()
    return delta.ids_target, kept
