"""The router before scripted decode servers: who gets a request, when another one may."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from runtime.server.backends import Backends
from runtime.server.router import RouterState, make_router

SSE = {"content-type": "text/event-stream; charset=utf-8"}
BODY = {"prompt": "x"}


class Server:
    """A scripted decode server; `act` answers a generation."""

    def __init__(self) -> None:
        self.is_healthy = True
        self.health_status = 200
        self.said: dict[str, Any] = {"role": "decode", "serves": "one model"}
        self.num_asked = 0
        self.was_left = threading.Event()
        self.port = 0
        self.act: Callable[[], Coroutine[Any, Any, Response]] = self.whole
        self._uvicorn: uvicorn.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def whole(self) -> Response:
        return Response(json.dumps({"from": self.port}), media_type="application/json")

    async def stream(self) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            for number in range(3):
                yield f"data: {number}\n\n".encode()
            yield b"data: [DONE]\n\n"

        return StreamingResponse(parts(), headers=SSE)

    async def stream_that_breaks(self) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"data: 0\n\n"
            await asyncio.sleep(0.05)
            raise RuntimeError("scripted death")

        return StreamingResponse(parts(), headers=SSE)

    async def stream_without_end(self) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"data: 0\n\n"
                    await asyncio.sleep(0.02)
            finally:
                self.was_left.set()

        return StreamingResponse(parts(), headers=SSE)

    async def silence(self) -> Response:
        await asyncio.sleep(30)
        return Response()

    async def breaks_before_an_answer(self) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            if self.num_asked >= 0:
                raise RuntimeError("scripted death")
            yield b""

        return StreamingResponse(parts(), media_type="application/json")

    async def full(self) -> Response:
        return Response('{"error": {"code": "SD914"}}', 429, headers={"retry-after": "1"})

    async def start(self) -> None:
        async def health(request: Request) -> Response:
            if not self.is_healthy:
                await asyncio.sleep(30)
            body = {"status": "ok", "peers": {"p:1": "ready"}} | self.said
            return Response(json.dumps(body), self.health_status)

        async def generate(request: Request) -> Response:
            await request.body()
            self.num_asked += 1
            return await self.act()

        app = Starlette(
            routes=[Route("/health", health), Route("/v1/completions", generate, methods=["POST"])]
        )
        config = uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=1)
        self._uvicorn = uvicorn.Server(config)
        self._task = asyncio.ensure_future(self._uvicorn._serve())
        while not self._uvicorn.started:
            await asyncio.sleep(0.005)
        self.port = self._uvicorn.servers[0].sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._uvicorn is not None
        self._uvicorn.should_exit = self._uvicorn.force_exit = True
        await self._task


@asynccontextmanager
async def routed(
    *servers: Server, num_ready: int = -1, timeout_s: float = 20
) -> AsyncIterator[httpx.AsyncClient]:
    """Start servers and a router; yield a client of the router.

    Args:
        servers: behind it.
        num_ready: to wait for; -1: all.
        timeout_s: for an answer of /health; a busy machine gives one in time.
    """
    async with AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=20), trust_env=False)
        backends = Backends([server.address for server in servers], client)
        app = make_router(
            RouterState(backends=backends, client=client), interval_s=0.05, timeout_s=timeout_s
        )
        router = Server()
        config = uvicorn.Config(app, port=0, log_level="critical", lifespan="on")
        router._uvicorn = uvicorn.Server(config)
        router._task = asyncio.ensure_future(router._uvicorn._serve())
        stack.push_async_callback(router.stop)
        wanted = len(servers) if num_ready < 0 else num_ready
        while not router._uvicorn.started or sum(b.is_ready for b in backends.all) < wanted:
            await asyncio.sleep(0.005)
        port = router._uvicorn.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as caller:
            yield caller


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


async def post(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/v1/completions", json=BODY)


def test_servers_take_turns_and_a_stream_passes_through() -> None:
    async def work() -> None:
        one, two = Server(), Server()
        async with routed(one, two) as client:
            found = {(await post(client)).json()["from"] for _ in range(2)}
            assert found == {one.port, two.port}
            one.act = two.act = one.stream
            answer = await post(client)
            assert answer.headers["content-type"] == SSE["content-type"]
            assert answer.text == "data: 0\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
            health = (await client.get("/health")).json()
            assert [item["status"] for item in health["decode"]] == ["ready", "ready"]
            assert health["decode"][0]["peers"] == {"p:1": "ready"}
            text = (await client.get("/metrics")).text
            assert 'specctl_router_requests_total{outcome="answered"} 3.0' in text

    run(work())


@pytest.mark.parametrize("act", ["full", "breaks_before_an_answer"])
def test_another_server_is_asked_while_the_client_has_no_byte(act: str) -> None:
    async def work() -> None:
        one, two = Server(), Server()
        async with routed(one, two) as client:
            one.act = getattr(one, act)
            for _ in range(2):
                answer = await post(client)
                assert (answer.status_code, answer.json()["from"]) == (200, two.port)
            assert one.num_asked >= 1

    run(work())


def test_a_stream_that_breaks_ends_with_an_error_event_and_is_not_started_again() -> None:
    async def work() -> None:
        one, two = Server(), Server()
        async with routed(one, two) as client:
            one.act, two.act = one.stream_that_breaks, two.stream_that_breaks
            answer = await post(client)
            events = answer.text.split("\n\n")
            assert events[0] == "data: 0"
            assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "SD866"
            assert events[2] == "data: [DONE]"
            assert one.num_asked + two.num_asked == 1

    run(work())


def test_a_server_that_falls_silent_loses_its_requests_to_another() -> None:
    async def work() -> None:
        one, two = Server(), Server()
        async with routed(one, two, timeout_s=1) as client:
            one.act = one.silence
            waiting = [asyncio.ensure_future(post(client)) for _ in range(2)]
            while not one.num_asked:
                await asyncio.sleep(0.005)
            one.is_healthy = False
            answers = await asyncio.gather(*waiting)
            assert {answer.json()["from"] for answer in answers} == {two.port}

    run(work())


def test_without_a_server_the_answer_says_so() -> None:
    async def work() -> None:
        client = httpx.AsyncClient(timeout=5, trust_env=False)
        backends = Backends(["127.0.0.1:1"], client)
        app = make_router(
            RouterState(backends=backends, client=client), interval_s=0.05, timeout_s=0.2
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://r") as caller:
            answer = await post(caller)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "SD866")
            assert "127.0.0.1:1" in answer.json()["error"]["message"]
            assert (await caller.get("/health")).status_code == 503
        await client.aclose()

    run(work())


def test_health_shows_the_prefill_servers_as_their_decode_server_sees_them_now() -> None:
    async def work() -> None:
        one = Server()
        async with routed(one, timeout_s=1) as client:

            async def until_peers(expected: dict[str, str]) -> None:
                found = None
                while found != expected:
                    await asyncio.sleep(0.01)
                    found = (await client.get("/health")).json()["decode"][0]["peers"]

            await until_peers({"p:1": "ready"})
            one.health_status, one.said["peers"] = 503, {"p:1": "SD861"}
            await until_peers({"p:1": "SD861"})
            one.is_healthy = False
            await until_peers({})

    run(work())


def test_a_client_that_goes_is_told_to_the_server() -> None:
    async def work() -> None:
        one = Server()
        async with routed(one) as client:
            one.act = one.stream_without_end
            async with client.stream("POST", "/v1/completions", json=BODY) as answer:
                assert await anext(answer.aiter_bytes())
            while not one.was_left.is_set():
                await asyncio.sleep(0.01)

    run(work())


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ({"role": "prefill"}, "a prefill server"),
        ({"serves": "another model"}, "serves another manifest"),
    ],
)
def test_a_server_of_another_kind_or_model_gets_no_request(
    said: dict[str, str], status: str
) -> None:
    async def work() -> None:
        one, two = Server(), Server()
        two.said |= said
        async with routed(one, two, num_ready=1) as client:
            states = await said_by(client)
            while not any(state.startswith(status) for state in states):
                await asyncio.sleep(0.01)
                states = await said_by(client)
            assert sorted(state == "ready" for state in states) == [False, True]
            assert len({(await post(client)).json()["from"] for _ in range(4)}) == 1

    run(work())


def test_a_new_model_is_served_once_the_old_one_is_gone() -> None:
    async def work() -> None:
        one, two = Server(), Server()
        async with routed(one, two, timeout_s=1) as client:
            one.said = two.said = {"serves": "another model"}
            one.is_healthy = False
            while (states := await said_by(client))[1] != "ready" or states[0] == "ready":
                await asyncio.sleep(0.01)
            one.is_healthy = True
            while await said_by(client) != ["ready", "ready"]:
                await asyncio.sleep(0.01)

    run(work())


async def said_by(client: httpx.AsyncClient) -> list[str]:
    """Return what the router says of each server."""
    return [item["status"] for item in (await client.get("/health")).json()["decode"]]
