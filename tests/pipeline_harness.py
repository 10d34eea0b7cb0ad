"""An engine whose target is spread over stages: a thread for every stage before the last."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from runtime.config import DRAFT_PROPOSERS, Overrides, RuntimeConfig, resolve_config
from runtime.engine.build import build_engine
from runtime.engine.engine import Engine
from runtime.engine.request import RequestInput
from runtime.engine.stages import StageLine, StageWorker
from runtime.loading import LoadedModels, load_models
from runtime.spec.oracle import OracleScript
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.stage_split import split_stages
from tests.engine_harness import KV_BLOCK_SIZE, World
from tests.queue_channel import QueueChannel
from tests.tiny_manifest import CPU

TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """An engine over threads.

    Args:
        engine: of the last stage.
        workers: of the stages before it, first stage first.
        errors: what ended a worker other than STOP.
    """

    engine: Engine
    models: LoadedModels
    line: StageLine
    workers: tuple[StageWorker, ...]
    errors: list[DiagnosticError]


def settings(world: World, **overrides: Any) -> RuntimeConfig:
    """Return small settings of an engine of a world."""
    given = Overrides(
        device="cpu",
        kv_block_size=KV_BLOCK_SIZE,
        max_num_requests=4,
        max_model_len=128,
        graphs="off",
    )
    return resolve_config(world.manifest, replace(given, **overrides))


@contextmanager
def staged_engine(
    world: World, num_stages: int, *, script: OracleScript | None = None, **overrides: Any
) -> Iterator[Staged]:
    """Run an engine over `num_stages` stages; its draft is loaded by the last one."""
    config = settings(world, pipeline_parallel=num_stages, **overrides)
    *earlier, last = (
        load_models(
            world.manifest,
            Path("/"),
            device=CPU,
            dtype=torch.float32,
            with_draft=config.proposer in DRAFT_PROPOSERS,
            stage=stage,
        )
        for stage in split_stages(
            world.manifest, num_stages, stage_layers=config.stage_layers or None
        )
    )
    controls = [QueueChannel(timeout_s=TIMEOUT_S) for _ in earlier]
    states = [QueueChannel(timeout_s=TIMEOUT_S) for _ in earlier]
    workers = tuple(
        StageWorker(
            models.target,
            control=controls[index],
            upstream=None if index == 0 else states[index - 1],
            downstream=states[index],
        )
        for index, models in enumerate(earlier)
    )
    errors: list[DiagnosticError] = []
    threads = [threading.Thread(target=_serve, args=(worker, errors)) for worker in workers]
    for thread in threads:
        thread.start()
    line = StageLine(last.target, controls=controls, upstream=states[-1])
    try:
        yield Staged(
            engine=build_engine(last, config, tokenizer=world.tokenizer, script=script, line=line),
            models=last,
            line=line,
            workers=workers,
            errors=errors,
        )
    finally:
        if line.problem is None:
            line.stop()
        for thread in threads:
            thread.join(2 * TIMEOUT_S)


def _serve(worker: StageWorker, errors: list[DiagnosticError]) -> None:
    try:
        worker.run()
    except DiagnosticError as error:
        errors.append(error)


def run(
    engine: Engine, requests: Sequence[RequestInput], *, arrivals: dict[int, int] | None = None
) -> dict[str, tuple[int, ...]]:
    """Run requests to their ends; return each one's ids. A request may join at a later step."""
    waiting = sorted(range(len(requests)), key=lambda i: (arrivals or {}).get(i, 0))
    ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
    step = 0
    while waiting or engine.has_work:
        while waiting and (arrivals or {}).get(waiting[0], 0) <= step:
            engine.add_request(requests[waiting.pop(0)])
        for delta in engine.step():
            assert delta.error is None, delta.error
            ids[delta.request_id] += delta.ids_target
        engine.check()
        step += 1
        assert step < 3000, "the engine makes no progress"
    return {name: tuple(found) for name, found in ids.items()}


def whole_engine(world: World, *, script: OracleScript | None = None, **overrides: Any) -> Engine:
    """Return an engine of one stage over the world's models."""
    config = settings(world, **overrides)
    return build_engine(world.models, config, tokenizer=world.tokenizer, script=script)


def scripted(
    answers: Mapping[str, tuple[int, ...]],
) -> dict[tuple[int, ...] | str, tuple[int, ...]]:
    """Return answers as an oracle's script takes them."""
    return {name: ids for name, ids in answers.items()}  # noqa: C416 - the key type widens
