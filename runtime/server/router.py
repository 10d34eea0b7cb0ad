"""One client address in front of several decode servers.

Invariants: bytes of an answer pass through as they come; a request goes to another server only
while the client has not been sent a byte of an answer, which for a whole answer means until all of
it is here; when the client goes, so does the request to the server; a stream whose server is lost
ends with an `error` event and `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from runtime.server.app import MAX_BODY_BYTES
from runtime.server.backends import Backend, Backends
from runtime.server.errors import error_object
from runtime.server.generation import error_response, json_response, until_disconnect
from runtime.server.metrics import CONTENT_TYPE
from runtime.server.responses import SSE_DONE, sse_event
from specctl.contract.diagnostics import Diagnostic, diagnose

T = TypeVar("T")

RETRIED = frozenset({429, 503})
"""Statuses of a server that takes nothing now; another one may."""

_PASSED = ("content-type", "retry-after", "cache-control", "x-accel-buffering")
_OUTCOMES = ("answered", "retried", "lost", "disconnected", "refused")


class _LostError(Exception):
    """A server ended, or fell silent, before its answer did."""


@dataclass(kw_only=True, slots=True)
class RouterState:
    """What the routes share.

    Args:
        backends: the decode servers.
        client: speaks with them.
        outcomes: requests answered in full, tried again, lost in mid-stream, left by their client,
            refused for want of a server.
    """

    backends: Backends
    client: httpx.AsyncClient
    outcomes: Counter[str] = field(default_factory=Counter)


def make_router(state: RouterState, *, interval_s: float, timeout_s: float) -> Starlette:
    """Build the application.

    Args:
        state: shared by the routes.
        interval_s: between two looks at each server's health.
        timeout_s: for a server to answer that look.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        watch = asyncio.ensure_future(state.backends.watch(interval_s, timeout_s))
        yield
        watch.cancel()
        await state.client.aclose()

    async def health(request: Request) -> Response:
        servers = [item.described() for item in state.backends.all]
        is_ready = any(item.is_ready for item in state.backends.all)
        document = {"status": "ok" if is_ready else "no decode server is ready"}
        return json_response(document | {"decode": servers}, 200 if is_ready else 503)

    async def metrics(request: Request) -> Response:
        return Response(metrics_text(state), media_type=CONTENT_TYPE)

    async def forward(request: Request) -> Response:
        return _Forwarded(state, request)

    passed = [
        Route(path, forward, methods=[method])
        for method, path in (
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/{name:path}"),
        )
    ]
    own = [Route("/health", health), Route("/metrics", metrics)]
    return Starlette(routes=[*own, *passed], lifespan=lifespan)


class _Forwarded(Response):
    """The answer of whichever server gives one."""

    def __init__(self, state: RouterState, request: Request) -> None:
        super().__init__()
        self._state = state
        self._request = request
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()
        async for part in self._request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                await error_response((_too_large(len(body)),))(scope, receive, send)
                return
        await until_disconnect(receive, self._answer(bytes(body), scope, receive, send))

    async def _answer(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        tried: list[Backend] = []
        last: Response | None = None
        while (backend := self._state.backends.choose(tried)) is not None:
            self._state.outcomes["retried"] += bool(tried)
            tried.append(backend)
            try:
                last = await self._ask(backend, body, send)
            except _LostError as error:
                if self._has_started:
                    await self._end_lost(backend, str(error), send)
                    return
                continue
            except asyncio.CancelledError:
                self._state.outcomes["disconnected"] += 1
                raise
            if last is None or last.status_code not in RETRIED:
                break
        if self._has_started:
            self._state.outcomes["answered"] += 1
            return
        self._state.outcomes["refused" if last is None else "answered"] += 1
        answer = last or error_response((_no_server(self._state.backends),))
        await answer(scope, receive, send)

    async def _ask(self, backend: Backend, body: bytes, send: Send) -> Response | None:
        """Return a server's whole answer; None: it was a stream and went to the client.

        Raises:
            _LostError: the server ended before its answer did.
        """
        client, asked = self._state.client, self._request
        request = client.build_request(
            asked.method,
            f"{backend.url}{asked.url.path}",
            content=body,
            headers={"content-type": asked.headers.get("content-type", "application/json")},
        )
        backend.num_open += 1
        try:
            answer = await _or_lost(backend, client.send(request, stream=True))
            try:
                if "text/event-stream" in answer.headers.get("content-type", ""):
                    await self._pass(backend, answer, send)
                    return None
                content = await _or_lost(backend, answer.aread())
            finally:
                await answer.aclose()
        except httpx.HTTPError as error:
            backend.failed(f"{type(error).__name__}: {error}")
            raise _LostError(str(error) or type(error).__name__) from error
        finally:
            backend.num_open -= 1
        return Response(content, answer.status_code, headers=_headers(answer))

    async def _pass(self, backend: Backend, answer: httpx.Response, send: Send) -> None:
        """Pass a stream through as it comes; its status goes with its first bytes."""
        parts = answer.aiter_raw()
        while (part := await _or_lost(backend, anext(parts, b""))) or not self._has_started:
            if not self._has_started:
                headers = [(k.encode(), v.encode()) for k, v in _headers(answer).items()]
                await send(
                    {"type": "http.response.start", "status": answer.status_code}
                    | {"headers": headers}
                )
                self._has_started = True
            if not part:
                break
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _end_lost(self, backend: Backend, found: str, send: Send) -> None:
        self._state.outcomes["lost"] += 1
        problem = diagnose(
            "SD866",
            where=f"decode server {backend.address}",
            message="the decode server was lost before its answer was complete",
            expected="an answer to its end",
            found=found,
        )
        ending = sse_event(msgspec.json.encode(error_object((problem,)))) + SSE_DONE
        await send({"type": "http.response.body", "body": ending, "more_body": False})


async def _or_lost(backend: Backend, work: Awaitable[T]) -> T:
    """Wait for a server, but not for one that is lost.

    Raises:
        _LostError: it is.
    """
    task, lost = asyncio.ensure_future(work), asyncio.ensure_future(backend.until_lost())
    try:
        await asyncio.wait((task, lost), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _LostError("it does not answer /health")
    finally:
        task.cancel()
        lost.cancel()


def _headers(answer: httpx.Response) -> dict[str, str]:
    return {name: answer.headers[name] for name in _PASSED if name in answer.headers}


def _no_server(backends: Backends) -> Diagnostic:
    return diagnose(
        "SD866",
        where="router",
        message="no decode server took the request",
        expected="one that is ready",
        found="; ".join(f"{item.address}: {item.problem or 'ready'}" for item in backends.all),
    )


def _too_large(size: int) -> Diagnostic:
    return diagnose(
        "SD917",
        where="body#",
        message="the body is too large",
        expected=f"at most {MAX_BODY_BYTES} bytes",
        found=f"{size} bytes or more",
    )


def metrics_text(state: RouterState) -> bytes:
    """Return one scrape: requests by outcome, and each decode server's state and load."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RouterCollector(state))
    return generate_latest(registry)


class _RouterCollector(Collector):
    def __init__(self, state: RouterState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "specctl_router_requests",
            "Requests by what became of them: answered, retried (on another decode server, before "
            "the client had a byte), lost (in mid-stream), disconnected, refused (no server).",
            labels=["outcome"],
        )
        for outcome in _OUTCOMES:
            requests.add_metric([outcome], self._state.outcomes[outcome])
        yield requests
        ready = GaugeMetricFamily(
            "specctl_router_decode_ready", "Whether a decode server is ready.", labels=["server"]
        )
        load = GaugeMetricFamily(
            "specctl_router_decode_open", "Requests open at a decode server.", labels=["server"]
        )
        for item in self._state.backends.all:
            ready.add_metric([item.address], float(item.is_ready))
            load.add_metric([item.address], item.num_open)
        yield ready
        yield load
