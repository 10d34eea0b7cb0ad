"""Engines over tensor-parallel ranks that are threads of this process, and what each committed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from runtime.config import Overrides, resolve_config
from runtime.engine.build import build_engine
from runtime.engine.engine import Engine
from runtime.engine.lockstep import EngineOrder, LockstepLeader
from runtime.engine.request import RequestInput, Usage
from runtime.loading import load_models
from runtime.parallel.ranks import Ranks, ThreadExchange
from specctl.contract.manifest import Manifest

T = TypeVar("T")
SMALL = Overrides(
    device="cpu",
    dtype="float32",
    kv_block_size=8,
    num_kv_blocks=40,
    max_num_requests=3,
    max_num_batched_tokens=40,
    max_model_len=96,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What an engine made of its requests."""

    ids_target: dict[str, tuple[int, ...]]
    usages: dict[str, Usage]

    @property
    def num_accepted_drafts(self) -> int:
        return sum(usage.num_accepted_drafts for usage in self.usages.values())


def on_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """Run `work` in a thread for each rank; a thread that fails wakes the others."""
    return on_rank_pairs(size, lambda ranks, _: work(ranks))


def on_rank_pairs(size: int, work: Callable[[Ranks, Ranks], T]) -> list[T]:
    """Run `work` in a thread for each rank, with ranks for sums and ranks for what is told."""
    exchanges = [ThreadExchange(size, timeout_s=180) for _ in range(2)]

    def guarded(ranks: Ranks, control: Ranks) -> T:
        is_done = False
        try:
            result = work(ranks, control)
            is_done = True
            return result
        finally:
            if not is_done:
                for exchange in exchanges:
                    exchange.abort()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, *(exchange.ranks() for exchange in exchanges)))


def ranked_engine(
    manifest: Manifest, ranks: Ranks, overrides: Overrides, *, is_draft_split: bool = True
) -> Engine:
    """Load one rank's shards and build its engine; sources of the manifest are absolute."""
    build = builder(manifest, ranks, is_draft_split=is_draft_split)
    return build(EngineOrder(config=resolve_config(manifest, overrides)))


def builder(
    manifest: Manifest, ranks: Ranks, *, is_draft_split: bool = True
) -> Callable[[EngineOrder], Engine]:
    """Load one rank's shards and return what builds engines over them."""
    models = load_models(
        manifest,
        Path("/"),
        device=torch.device("cpu"),
        dtype=torch.float32,
        ranks=ranks,
        is_draft_split=is_draft_split,
    )
    return lambda order: build_engine(models, order.config, script=order.script)


def answer(engine: Engine | LockstepLeader, requests: Sequence[RequestInput]) -> Outcome:
    """Run requests to their ends."""
    for request in requests:
        engine.add_request(request)
    ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
    usages: dict[str, Usage] = {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            ids[delta.request_id] += delta.ids_target
            usages[delta.request_id] = delta.usage
        engine.check()
    return Outcome(ids_target={name: tuple(found) for name, found in ids.items()}, usages=usages)
