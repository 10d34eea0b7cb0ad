"""Workers of earlier stages, as threads: a forward through them has the bits of the whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from runtime.batch import PreparedBatch
from runtime.engine.stages import PipelinedTarget, StageWorker
from runtime.kv import KVLayer, KVPool
from runtime.loading import read_target
from runtime.models import TargetModel
from runtime.parallel.channels import QueueChannel
from runtime.parallel.messages import SlotNews
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import Manifest
from specctl.contract.stage_split import split_stages
from tests.tiny import VOCAB_SIZE, write_tiny_target
from tests.tiny_manifest import CPU, tiny_manifest

AUX = (0, 1, 3)
BLOCK_SIZE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A pipelined target, its KV, and the workers before it."""

    target: PipelinedTarget
    kv: tuple[KVLayer, ...]
    workers: tuple[StageWorker, ...]
    errors: list[BaseException]


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return tiny_manifest(write_tiny_target(tmp_path / "target", num_layers=4))


def read(manifest: Manifest, num_stages: int) -> list[TargetModel]:
    return [
        read_target(manifest, Path("/"), device=CPU, dtype=torch.float32, stage=stage)[0]
        for stage in split_stages(manifest, num_stages)
    ]


def new_kv(model: TargetModel) -> tuple[KVLayer, ...]:
    return KVPool(
        model.kv_specs, num_blocks=16, kv_block_size=BLOCK_SIZE, dtype=model.dtype, device=CPU
    ).layers


@contextmanager
def line(manifest: Manifest, num_stages: int) -> Iterator[Line]:
    """Start a worker thread for every stage before the last."""
    *earlier, last = read(manifest, num_stages)
    controls = [QueueChannel(timeout_s=20) for _ in earlier]
    states = [QueueChannel(timeout_s=20) for _ in earlier]
    workers = tuple(
        StageWorker(
            model,
            new_kv(model),
            control=controls[index],
            upstream=None if index == 0 else states[index - 1],
            downstream=states[index],
        )
        for index, model in enumerate(earlier)
    )
    errors: list[BaseException] = []

    def serve(worker: StageWorker) -> None:
        try:
            worker.run()
        except DiagnosticError as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    target = PipelinedTarget(last, controls=controls, upstream=states[-1])
    try:
        yield Line(target=target, kv=new_kv(last), workers=workers, errors=errors)
    finally:
        target.stop()
        for thread in threads:
            thread.join(20)


def rows(slot: int, start: int, num_rows: int) -> PreparedBatch:
    """Rows of one request whose blocks are 8 of its own."""
    positions = torch.arange(start, start + num_rows)
    blocks = torch.arange(8) + 8 * slot
    return PreparedBatch(
        ids_target_N=(positions * 7 + 3 + slot) % VOCAB_SIZE,
        positions_N=positions,
        slots_N=blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        row_request_N=torch.zeros(num_rows, dtype=torch.int32),
        block_tables_BT=blocks[None].to(torch.int32),
        max_length=start + num_rows,
    )


def news(slot: int, start: int, num_rows: int, num_final_rows: int) -> SlotNews:
    return SlotNews(slot=slot, start=start, num_rows=num_rows, num_final_rows=num_final_rows)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_forwards_under_way_give_the_bits_of_the_whole(manifest: Manifest, num_stages: int) -> None:
    """Two requests take turns, a prefill and a verify whose drafts are mostly rejected."""
    steps = [
        (rows(0, 0, 9), news(0, 0, 9, -1)),
        (rows(1, 0, 5), news(1, 0, 5, -1)),
        (rows(0, 9, 5), news(0, 9, 5, 9)),
        (rows(1, 5, 3), news(1, 5, 3, 5)),
        (rows(0, 11, 4), news(0, 11, 4, 2)),
    ]
    (whole,) = read(manifest, 1)
    kv = new_kv(whole)
    with line(manifest, num_stages) as pipeline, torch.inference_mode():
        for batch, item in steps:
            pipeline.target.submit(batch, pipeline.kv, AUX, [item])
        assert pipeline.target.num_submitted == len(steps)
        for batch, _ in steps:
            expected = whole.forward(batch, kv, AUX)
            found = pipeline.target.collect()
            assert torch.equal(found.hidden_ND, expected.hidden_ND)
            assert found.aux_hidden_NA is not None
            assert expected.aux_hidden_NA is not None
            assert torch.equal(found.aux_hidden_NA, expected.aux_hidden_NA)
        for worker in pipeline.workers:
            assert worker.ends == {0: 15, 1: 8}


def test_a_stage_that_is_told_of_another_length_refuses(manifest: Manifest) -> None:
    with line(manifest, 2) as pipeline, torch.inference_mode():
        pipeline.target.submit(rows(0, 0, 9), pipeline.kv, (), [news(0, 0, 9, -1)])
        pipeline.target.collect()
        pipeline.target.submit(rows(0, 9, 5), pipeline.kv, (), [news(0, 9, 5, 8)])
        pipeline.target.stop()
    assert [error.diagnostics[0].code for error in pipeline.errors] == ["SD854"]
