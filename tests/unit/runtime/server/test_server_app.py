"""Routes, streaming, admission and faults over a scripted engine, through the ASGI interface."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.engine.request import RequestDelta, RequestInput
from runtime.server.app import Services, make_app
from runtime.server.front import Front
from runtime.server.loop import EngineLoop
from tests.unit.runtime.server.scripted_engine import (
    BREAK_STEP_ID,
    REFUSE_ID,
    TOKENIZER,
    ScriptedEngine,
    answer_ids,
    served_model,
)

REQUESTS = Path(__file__).parents[4] / "fixtures" / "requests"


class Stand:
    """An application over a scripted engine and a client for it."""

    def __init__(self, engine: ScriptedEngine, *, max_queue: int) -> None:
        self.engine = engine
        self.loop = EngineLoop(engine)
        self.front = Front(self.loop, max_num_requests=engine.max_running, max_queue=max_queue)
        self.app = make_app(
            Services(
                front=self.front,
                served=served_model(),
                info=lambda: {"settings": {}},
                verification="seeded",
                proposer="none",
            )
        )
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def complete(self, **body: object) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": [5], "seed": 1, **body})

    async def metrics(self) -> dict[str, float]:
        text = (await self.http.get("/metrics")).text
        return {
            sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@asynccontextmanager
async def stand(
    *, max_queue: int = 100, tokens_per_step: int = 3, max_running: int = 8
) -> AsyncIterator[Stand]:
    engine = ScriptedEngine(tokens_per_step=tokens_per_step, max_running=max_running)
    made = Stand(engine, max_queue=max_queue)
    made.loop.start()
    async with made.http:
        yield made
    engine.gate.set()
    made.loop.stop(60)
    assert not made.loop.is_alive


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))  # type: ignore[arg-type]


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def expected_text(index: int = 0, count: int = 16) -> str:
    letters = [3 + (5 + 1 + 7 * index + 5 * i) % 95 for i in range(count)]
    return TOKENIZER.decode(letters)


def test_whole_completion_has_text_usage_and_seed() -> None:
    async def test() -> None:
        async with stand() as s:
            body = (await s.complete(return_token_ids=True)).json()
            assert body["object"] == "text_completion"
            assert body["choices"][0]["text"] == expected_text()
            assert body["choices"][0]["finish_reason"] == "length"
            assert len(body["choices"][0]["token_ids"]) == 16
            assert body["seed"] == 1
            usage = body["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (1, 16)
            assert usage["total_tokens"] == 17
            details = usage["completion_tokens_details"]
            assert details == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 2}

    run(test)


def test_stream_adds_up_to_the_whole_answer() -> None:
    async def test() -> None:
        async with stand() as s:
            response = await s.complete(
                stream=True, stream_options={"include_usage": True}, return_token_ids=True
            )
            assert response.headers["content-type"].startswith("text/event-stream")
            *chunks, last = events_of(response)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected_text()
            ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
            assert len(ids) == last["usage"]["completion_tokens"] == 16
            assert len(chunks) <= 16
            assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [
                *[None] * (len(chunks) - 1),
                "length",
            ]
            assert all(chunk["usage"] is None for chunk in chunks)
            assert last["choices"] == []
            assert {chunk["id"] for chunk in [*chunks, last]} == {last["id"]}

    run(test)


def test_chat_stream_sends_the_role_once() -> None:
    async def test() -> None:
        async with stand() as s:
            body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
            events = events_of(await s.http.post("/v1/chat/completions", json=body))
            roles = [event["choices"][0]["delta"].get("role") for event in events]
            assert roles == ["assistant", *[None] * (len(events) - 1)]
            assert {event["object"] for event in events} == {"chat.completion.chunk"}
            whole = await s.http.post("/v1/chat/completions", json={**body, "stream": False})
            assert whole.json()["choices"][0]["message"]["role"] == "assistant"

    run(test)


@pytest.mark.parametrize("is_stream", [False, True])
def test_choices_and_prompts_keep_their_index(is_stream: bool) -> None:
    async def test() -> None:
        async with stand(max_running=2) as s:
            response = await s.complete(n=3, max_tokens=4, stream=is_stream)
            if is_stream:
                texts = ["", "", ""]
                for event in events_of(response):
                    choice = event["choices"][0]
                    texts[choice["index"]] += choice["text"]
            else:
                texts = [choice["text"] for choice in response.json()["choices"]]
                assert response.json()["usage"]["prompt_tokens"] == 1
                assert response.json()["usage"]["completion_tokens"] == 12
            assert texts == [expected_text(index, 4) for index in range(3)]

    run(test)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_the_engine_refuses_ends_alone_with_500(is_stream: bool) -> None:
    async def test() -> None:
        async with stand() as s:
            good, bad = await asyncio.gather(
                s.complete(), s.complete(prompt=[REFUSE_ID], stream=is_stream)
            )
            assert good.json()["choices"][0]["text"] == expected_text()
            assert bad.status_code == 500
            assert bad.json()["error"]["code"] == "SD916"
            assert "scripted refusal" in bad.json()["error"]["message"]

    run(test)


def test_a_step_that_fails_ends_what_is_in_flight_and_the_next_request_works() -> None:
    async def test() -> None:
        async with stand() as s:
            bad = await s.complete(prompt=[BREAK_STEP_ID])
            assert (bad.status_code, bad.json()["error"]["code"]) == (500, "SD916")
            assert (await s.complete()).status_code == 200
            assert (await s.metrics())["specctl_requests_total[error]"] == 1

    run(test)


def test_an_error_after_the_first_chunk_is_an_event_and_the_stream_ends() -> None:
    async def test() -> None:
        async with stand(tokens_per_step=1) as s:
            s.engine.gate.clear()
            s.engine.hold_at = 3
            asking = asyncio.create_task(s.complete(stream=True, max_tokens=40))
            await until(lambda: s.engine.num_sent == 3)
            s.front.close_admission()
            s.front.end_all("within the 0.1 s of grace")
            s.engine.gate.set()
            events = events_of(await asking)
            assert events[-1]["error"]["code"] == "SD915"
            refused = await s.complete()
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert (await s.http.get("/health")).status_code == 503

    run(test)


def test_a_full_queue_answers_429_and_health_stays_responsive() -> None:
    async def test() -> None:
        async with stand(max_queue=4, max_running=2) as s:
            s.engine.gate.clear()
            asking = [asyncio.create_task(s.complete(seed=i)) for i in range(50)]
            await until(lambda: sum(task.done() for task in asking) == 44)
            refused = [task.result() for task in asking if task.done()]
            assert {response.status_code for response in refused} == {429}
            assert all(int(response.headers["retry-after"]) > 0 for response in refused)
            assert refused[0].json()["error"]["code"] == "SD914"
            assert refused[0].json()["error"]["type"] == "rate_limit_error"
            assert (await s.http.get("/health")).json() == {"status": "ok"}
            s.engine.gate.set()
            done = [await task for task in asking]
            assert sum(response.status_code == 200 for response in done) == 6
            assert s.front.num_open == 0
            assert (await s.metrics())["specctl_requests_total[rejected]"] == 44

    run(test)


def test_more_choices_than_places_are_refused_for_good() -> None:
    async def test() -> None:
        async with stand(max_queue=4, max_running=2) as s:
            assert (await s.complete(n=6)).status_code == 200
            refused = await s.complete(n=7)
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert (error["code"], error["param"]) == ("SD904", "n")

    run(test)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_engine_thread_dies_nobody_waits_and_health_says_so() -> None:
    async def test() -> None:
        async with stand() as s:
            s.engine.is_broken = True  # even dropping a request fails
            first = await s.complete(prompt=[BREAK_STEP_ID])
            assert (first.status_code, first.json()["error"]["code"]) == (500, "SD916")
            await until(lambda: not s.loop.is_alive)
            later = await s.complete()
            assert (later.status_code, later.json()["error"]["code"]) == (500, "SD916")
            s.loop.submit([RequestInput(request_id="a", prompt_ids_target=[5])], late.append)
            assert [delta.finish_reason for delta in late] == ["error"]
            flushed = await s.http.post("/flush_cache")
            assert (flushed.status_code, flushed.json()["error"]["code"]) == (500, "SD916")
            health = await s.http.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "engine stopped"})

    late: list[RequestDelta] = []
    run(test)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("when", ["before the first token", "later"])
def test_a_client_that_goes_has_its_requests_aborted(is_stream: bool, when: str) -> None:
    """Both children of n = 2 are aborted; the other request is unaffected."""

    async def test() -> None:
        async with stand(tokens_per_step=1) as s:
            s.engine.gate.clear()
            s.engine.hold_at = 3 if when == "later" else 0
            body = {"prompt": [5], "n": 2, "max_tokens": 40, "stream": is_stream}
            gone = asyncio.Event()
            calling = asyncio.create_task(call_and_leave(s, body, gone))
            await until(lambda: len(s.engine.requests) == 2)
            other = asyncio.create_task(s.complete(max_tokens=12))
            await until(lambda: s.engine.num_sent == s.engine.hold_at)
            gone.set()
            await calling
            assert s.front.num_open <= 1
            s.engine.gate.set()
            assert (await other).json()["choices"][0]["text"] == expected_text(count=12)
            await until(lambda: not s.engine.requests)
            assert len(s.engine.aborted) == 2
            assert (await s.metrics())["specctl_requests_total[disconnected]"] == 2
            assert (await s.metrics())["specctl_requests_open"] == 0

    run(test)


async def call_and_leave(s: Stand, body: dict[str, object], gone: asyncio.Event) -> None:
    """Call the application as a client that disconnects when `gone` is set."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [],
        "scheme": "http",
        "server": ("test", 80),
        "client": ("test", 1),
    }
    await s.app(scope, receive, send)  # type: ignore[arg-type]


def test_models_info_flush_and_unknown_routes() -> None:
    async def test() -> None:
        async with stand() as s:
            models = (await s.http.get("/v1/models")).json()
            assert [model["id"] for model in models["data"]] == ["tiny"]
            assert (await s.http.get("/v1/models/tiny")).json()["max_model_len"] == 512
            missing = await s.http.get("/v1/models/other")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "SD907")
            assert (await s.http.get("/info")).json() == {"settings": {}}
            assert (await s.http.post("/flush_cache")).json() == {"status": "flushed"}
            assert s.engine.num_flushes == 1
            case = json.loads((REQUESTS / "route-unknown.json").read_text())
            unknown = await s.http.post(case["path"], json=case["body"])
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "SD918")
            wrong_method = await s.http.get("/v1/completions")
            assert (wrong_method.status_code, wrong_method.json()["error"]["code"]) == (
                405,
                "SD918",
            )

    run(test)


def test_a_body_over_the_limit_is_413() -> None:
    async def test() -> None:
        async with stand() as s:
            response = await s.http.post("/v1/completions", content=b" " * (33 << 20))
            assert (response.status_code, response.json()["error"]["code"]) == (413, "SD917")

    run(test)


def test_metrics_state_their_definitions() -> None:
    async def test() -> None:
        async with stand() as s:
            await s.complete()
            text = (await s.http.get("/metrics")).text
            (help_line,) = [
                x for x in text.splitlines() if x.startswith("# HELP specctl_accept_length ")
            ]
            assert "1 + accepted drafts / verify rounds" in help_line
            values = await s.metrics()
            assert values["specctl_accept_length"] == 1 + 6 / 4
            assert values["specctl_accepted_drafts_at_position_total[1]"] == 3
            assert values["specctl_proposed_drafts_total"] == 12
            assert values["specctl_accepted_drafts_total"] == 6
            assert values["specctl_queue_depth"] == values["specctl_requests_running"] == 0
            assert values["specctl_prefix_hit_tokens_total"] == 1
            assert values["specctl_requests_total[length]"] == 1
            assert 'verification="seeded"' in text

    run(test)


def test_scripted_answers_depend_on_the_seed() -> None:
    async def test() -> None:
        async with stand() as s:
            first, again, other = [await s.complete(seed=seed) for seed in (3, 3, 4)]
            assert first.json()["choices"] == again.json()["choices"]
            assert first.json()["choices"] != other.json()["choices"]

    run(test)


def test_answer_ids_has_the_length_asked_for() -> None:
    assert len(answer_ids(RequestInput(request_id="a", prompt_ids_target=[5], max_tokens=7))) == 7
