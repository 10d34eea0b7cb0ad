"""From a subscription to an HTTP answer, whole or streamed, with the client watched meanwhile.

Invariants: the status line is sent only after the first delta, so a request that the engine refuses
has its proper status; when the client goes, at any point, the requests are aborted; an error after
the first chunk is an `error` event, and a stream always ends with `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.engine.request import RequestDelta
from runtime.server.errors import error_object, http_status
from runtime.server.front import RETRY_AFTER_S, Subscription
from runtime.server.responses import (
    SSE_DONE,
    Choice,
    Envelope,
    chunk,
    sse_event,
    usage_chunk,
    whole_response,
)
from specctl.contract.diagnostics import Diagnostic

_RETRY_STATUSES = frozenset({429, 503})


def json_response(content: object, status: int = 200) -> Response:
    """Build a JSON response; 429 and 503 carry `Retry-After`."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in _RETRY_STATUSES else None
    return Response(
        msgspec.json.encode(content), status, headers=headers, media_type="application/json"
    )


def error_response(diagnostics: tuple[Diagnostic, ...]) -> Response:
    """Build the error response of a refused or failed request."""
    return json_response(error_object(diagnostics), http_status(diagnostics[0]))


class GenerationResponse(Response):
    """The answer to one body; closes its subscription however it ends."""

    def __init__(
        self,
        subscription: Subscription,
        envelope: Envelope,
        *,
        num_requests: int,
        num_choices: int,
        is_stream: bool,
        has_usage: bool,
    ) -> None:
        """Answer with `num_requests` choices, `num_choices` for each prompt."""
        super().__init__()
        self._subscription = subscription
        self._envelope = envelope
        self._choices = [Choice(index=index) for index in range(num_requests)]
        self._num_choices = num_choices
        self._is_stream = is_stream
        self._has_usage = has_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer until it is complete or the client is gone."""
        answer = (
            self._stream(scope, receive, send)
            if self._is_stream
            else self._whole(scope, receive, send)
        )
        try:
            await until_disconnect(receive, answer)
        finally:
            self._subscription.close()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        while not self._is_complete:
            delta = await self._subscription.next()
            if delta.error is not None:
                await error_response((delta.error,))(scope, receive, send)
                return
            self._choice(delta).add(delta)
        body = whole_response(self._envelope, self._choices, self._num_choices)
        await json_response(body)(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        delta = await self._subscription.next()
        if delta.error is not None:
            await error_response((delta.error,))(scope, receive, send)
            return
        await send(_start_event())
        while True:
            await self._send_delta(delta, send)
            if delta.error is not None or self._is_complete:
                break
            delta = await self._subscription.next()
        if self._has_usage and delta.error is None:
            await _send_json(usage_chunk(self._envelope, self._choices, self._num_choices), send)
        await _send(SSE_DONE, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_delta(self, delta: RequestDelta, send: Send) -> None:
        if delta.error is not None:
            await _send_json(error_object((delta.error,)), send)
            return
        choice = self._choice(delta)
        choice.add(delta)
        document = chunk(self._envelope, choice, delta, has_usage_key=self._has_usage)
        if document is not None:
            await _send_json(document, send)

    @property
    def _is_complete(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    def _choice(self, delta: RequestDelta) -> Choice:
        return self._choices[self._subscription.index_of(delta.request_id)]


async def until_disconnect(receive: Receive, answer: Coroutine[None, None, None]) -> None:
    """Run the answer; cancel it when the client goes first."""
    tasks = (asyncio.ensure_future(answer), asyncio.ensure_future(_wait_for_disconnect(receive)))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        outcome, _ = await asyncio.gather(*tasks, return_exceptions=True)
    if isinstance(outcome, Exception):  # a cancelled answer is no exception: the client is gone
        raise outcome


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _start_event() -> dict[str, object]:
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ],
    }


async def _send_json(document: object, send: Send) -> None:
    await _send(sse_event(msgspec.json.encode(document)), send)


async def _send(data: bytes, send: Send) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
