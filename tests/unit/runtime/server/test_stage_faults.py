"""A pipeline that has ended: requests get its code, and the server says so from then on."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from runtime.engine.request import RequestDelta, RequestInput
from runtime.server.errors import http_status
from runtime.server.front import Front
from runtime.server.loop import EngineLoop
from runtime.server.metrics import metrics_text
from runtime.server.stage_metrics import StageCollector
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.stage_split import Stage
from tests.unit.runtime.server.scripted_engine import ScriptedEngine

LOST = diagnose(
    "SD855",
    where="pipeline",
    message="a neighbouring stage is gone or silent",
    found="rank 1 ended with exit code 9",
)


@dataclass
class Line:
    """What the stages before the last one have come to."""

    problem: Diagnostic | None = None


class BrokenEngine(ScriptedEngine):
    """Loses a stage in its first step."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line

    def step(self) -> tuple[RequestDelta, ...]:
        self._line.problem = LOST
        raise DiagnosticError(LOST)


def request(name: str) -> RequestInput:
    return RequestInput(request_id=name, prompt_ids_target=(5,), max_tokens=4)


def test_a_lost_stage_ends_requests_with_its_code_and_refuses_the_next() -> None:
    line = Line()
    loop = EngineLoop(BrokenEngine(line), fault=lambda: line.problem)
    front = Front(loop, max_num_requests=2, max_queue=2)
    loop.start()
    try:

        async def talk() -> RequestDelta:
            subscription = front.submit([request("a")])
            delta = await asyncio.wait_for(subscription.next(), 20)
            subscription.close()
            with pytest.raises(DiagnosticError) as caught:
                front.submit([request("b")])
            assert caught.value.diagnostics == (LOST,)
            return delta

        delta = asyncio.run(talk())
    finally:
        loop.stop(20)
    assert (delta.finish_reason, delta.error) == ("error", LOST)
    assert http_status(LOST) == 503
    assert front.outcomes["rejected"] == 1


def test_a_lost_stage_is_logged_in_a_line_and_a_fault_of_ours_with_its_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Faulty(ScriptedEngine):
        def step(self) -> tuple[RequestDelta, ...]:
            raise ZeroDivisionError("no rows")

    for engine in (BrokenEngine(Line()), Faulty()):
        loop = EngineLoop(engine)
        front = Front(loop, max_num_requests=2, max_queue=2)
        loop.start()

        async def talk(front: Front = front) -> None:
            subscription = front.submit([request("a")])
            await asyncio.wait_for(subscription.next(), 20)

        asyncio.run(talk())
        loop.stop(20)
    lost, fault = [record for record in caplog.records if record.levelname == "ERROR"]
    assert not lost.exc_info
    assert "SD855" in lost.getMessage()
    assert "exit code 9" in lost.getMessage()
    assert fault.exc_info is not None


def test_a_forced_end_leaves_no_engine_thread_that_fails() -> None:
    """A second Ctrl-C closes the event loop while a round runs; its tokens have no reader."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(ScriptedEngine):
        def step(self) -> tuple[RequestDelta, ...]:
            begun.set()
            assert go_on.wait(20)
            return super().step()

    loop = EngineLoop(Slow())
    front = Front(loop, max_num_requests=2, max_queue=2)
    loop.start()

    async def talk() -> None:
        front.submit([request("a")])
        await asyncio.to_thread(begun.wait, 20)

    asyncio.run(talk())
    go_on.set()
    loop.flush().result(20)
    assert loop.is_alive
    loop.stop(20)


def test_a_flush_that_nobody_waits_for_any_more_leaves_the_thread_running() -> None:
    engine = ScriptedEngine()
    engine.gate.clear()
    loop = EngineLoop(engine)
    loop.start()
    try:
        loop.submit([request("a")], lambda _: None)
        while not engine.requests:
            time.sleep(0.001)
        assert loop.flush().cancel()
        engine.gate.set()
        loop.flush().result(60)
        assert loop.is_alive
        assert engine.num_flushes == 1
    finally:
        engine.gate.set()
        loop.stop(60)


def test_metrics_of_stages() -> None:
    line = Line()
    stages = [
        Stage(
            index=index,
            first_layer=2 * index,
            num_layers=2,
            has_embedding=index == 0,
            has_head=index == 1,
            draft_embedding="checkpoint" if index else None,
            target_bytes=100,
            draft_bytes=7 * index,
        )
        for index in range(2)
    ]
    registry = CollectorRegistry()
    registry.register(StageCollector(stages, problem=lambda: line.problem))

    def scrape() -> dict[str, float]:
        text = metrics_text(registry).decode()
        return {
            sample.name + "".join(sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    assert scrape() == {
        "specctl_stage_layers0": 2,
        "specctl_stage_layers1": 2,
        "specctl_stage_weight_bytes0": 100,
        "specctl_stage_weight_bytes1": 107,
        "specctl_pipeline_up": 1,
    }
    line.problem = LOST
    assert scrape()["specctl_pipeline_up"] == 0
