"""Workers of earlier stages, as threads: a forward through them has the bits of the whole."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from runtime.batch import PreparedBatch
from runtime.engine.stages import PipelinedTarget, StageLine, StageWorker
from runtime.kv import KVLayer, KVPool
from runtime.loading import read_target
from runtime.models import TargetModel
from runtime.parallel.messages import SlotNews
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import Manifest
from specctl.contract.stage_split import split_stages
from tests.queue_channel import QueueChannel
from tests.tiny import VOCAB_SIZE, write_tiny_target
from tests.tiny_manifest import CPU, tiny_manifest

AUX = (0, 1, 3)
BLOCK_SIZE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A pipelined target, its KV, and the workers before it."""

    stages: StageLine
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
    controls = [QueueChannel(timeout_s=60) for _ in earlier]
    states = [QueueChannel(timeout_s=60) for _ in earlier]
    workers = tuple(
        StageWorker(
            model,
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
        except (DiagnosticError, IndexError) as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    stages = StageLine(last, controls=controls, upstream=states[-1])
    target = stages.open(num_kv_blocks=16, kv_block_size=BLOCK_SIZE)
    try:
        yield Line(stages=stages, target=target, kv=new_kv(last), workers=workers, errors=errors)
    finally:
        stages.stop()
        for thread in threads:
            thread.join(60)


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
        for batch, _ in steps:
            expected = whole.forward(batch, kv, AUX)
            found = pipeline.target.collect()
            assert torch.equal(found.hidden_ND, expected.hidden_ND)
            assert found.aux_hidden_NA is not None
            assert expected.aux_hidden_NA is not None
            assert torch.equal(found.aux_hidden_NA, expected.aux_hidden_NA)
        for worker in pipeline.workers:
            assert worker.ends() == {0: 15, 1: 8}


def test_a_stage_that_is_told_of_another_length_refuses(manifest: Manifest) -> None:
    with line(manifest, 2) as pipeline, torch.inference_mode():
        pipeline.target.submit(rows(0, 0, 9), pipeline.kv, (), [news(0, 0, 9, -1)])
        pipeline.target.collect()
        pipeline.target.submit(rows(0, 9, 5), pipeline.kv, (), [news(0, 9, 5, 8)])
        pipeline.stages.stop()
    assert [type(error) for error in pipeline.errors] == [DiagnosticError]
    assert "SD854" in str(pipeline.errors[0])


def test_a_stage_s_refusal_reaches_the_last_one_and_stays(manifest: Manifest) -> None:
    """The code of the stage that failed, through the stages between, for this call and the next."""
    with line(manifest, 3) as pipeline, torch.inference_mode():
        pipeline.target.submit(rows(0, 0, 9), pipeline.kv, (), [news(0, 3, 9, 4)])
        with pytest.raises(DiagnosticError, match="SD854"):
            pipeline.target.collect()
        with pytest.raises(DiagnosticError, match="SD854"):
            pipeline.target.submit(rows(0, 0, 9), pipeline.kv, (), [news(0, 0, 9, -1)])
        assert pipeline.stages.problem is not None


def test_a_fault_of_a_stage_is_named(manifest: Manifest) -> None:
    with line(manifest, 2) as pipeline, torch.inference_mode():
        broken = rows(0, 0, 9)
        pipeline.target.submit(
            replace(broken, ids_target_N=broken.ids_target_N + 10**6),
            pipeline.kv,
            (),
            [news(0, 0, 9, -1)],
        )
        with pytest.raises(DiagnosticError, match=r"SD856 .* a stage failed: IndexError") as caught:
            pipeline.target.collect()
    assert caught.value.diagnostics[0].where == "pipeline, layers 0 to 1"


class ForgetfulChannel(QueueChannel):
    """As gloo: what the receiver has not asked for when the sender is let go never comes."""

    def flush(self) -> None:
        while not self._messages.empty():
            time.sleep(0.001)

    def forget(self) -> None:
        while not self._messages.empty():
            self._messages.get_nowait()


def test_a_stage_does_not_end_before_its_fault_was_asked_for(manifest: Manifest) -> None:
    """The last stage is busy with its own layers when the stage before it fails."""
    first, last = read(manifest, 2)
    control, states = QueueChannel(), ForgetfulChannel(timeout_s=1)
    worker = StageWorker(first, control=control, upstream=None, downstream=states)

    def serve() -> None:
        with pytest.raises(DiagnosticError, match="SD854"):
            worker.run()
        states.forget()

    thread = threading.Thread(target=serve)
    thread.start()
    target = StageLine(last, controls=[control], upstream=states).open(
        num_kv_blocks=16, kv_block_size=BLOCK_SIZE
    )
    target.submit(rows(0, 0, 9), new_kv(last), (), [news(0, 3, 9, 4)])
    thread.join(1)  # the stage has all the time to end
    with pytest.raises(DiagnosticError, match="SD854"):
        target.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_each_engine_has_lengths_and_keys_of_its_own(manifest: Manifest) -> None:
    """The same slot at other positions; a pool that was given up is made again."""
    (whole,) = read(manifest, 1)
    with line(manifest, 2) as pipeline, torch.inference_mode():
        other = pipeline.stages.open(num_kv_blocks=16, kv_block_size=BLOCK_SIZE)
        for target, num_rows in ((pipeline.target, 9), (other, 5)):
            target.submit(rows(0, 0, num_rows), pipeline.kv, (), [news(0, 0, num_rows, -1)])
            expected = whole.forward(rows(0, 0, num_rows), new_kv(whole)).hidden_ND
            assert torch.equal(target.collect().hidden_ND, expected)
        pipeline.target.submit(rows(0, 9, 2), pipeline.kv, (), [news(0, 9, 2, 9)])
        pipeline.target.collect()
        assert [pipeline.workers[0].ends(engine) for engine in (0, 1)] == [{0: 11}, {0: 5}]
        other.close()
        pipeline.stages.beat(0.0)


def test_forwards_that_are_let_go_leave_the_line_in_step(manifest: Manifest) -> None:
    (whole,) = read(manifest, 1)
    with line(manifest, 3) as pipeline, torch.inference_mode():
        for slot in (0, 1):
            pipeline.target.submit(rows(slot, 0, 5), pipeline.kv, (), [news(slot, 0, 5, -1)])
        pipeline.target.abandon()
        pipeline.target.submit(rows(1, 0, 6), pipeline.kv, (), [news(1, 0, 6, 0)])
        expected = whole.forward(rows(1, 0, 6), new_kv(whole)).hidden_ND
        assert torch.equal(pipeline.target.collect().hidden_ND, expected)
