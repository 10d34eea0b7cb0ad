"""The HTTP routes. docs/reference/server.md describes them.

Invariants: no route waits for the engine except a generation and a flush; every error body has
OpenAI's shape; a body is read up to `MAX_BODY_BYTES`.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client.registry import Collector
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from runtime.server.front import Front
from runtime.server.generation import GenerationResponse, error_response, json_response
from runtime.server.metrics import CONTENT_TYPE, MetricsCollector, make_registry, metrics_text
from runtime.server.options import ROUTES, Endpoint
from runtime.server.parse import RequestOptions, decode_body, parse_chat, parse_completion
from runtime.server.prepare import (
    Prepared,
    ServedModel,
    check_model,
    prepare_chat,
    prepare_completion,
)
from runtime.server.responses import Envelope
from runtime.server.role import Role
from specctl.contract.diagnostics import DiagnosticError, diagnose

MAX_BODY_BYTES = 32 << 20
ENGINE_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Services:
    """What the routes use.

    Args:
        info: makes the document of `/info`.
        verification: mode under which sampled drafts are accepted.
        role: the half of the work that this server does; None: all of it.
        collectors: of further metrics.
    """

    front: Front
    served: ServedModel
    info: Callable[[], dict[str, object]]
    verification: str
    proposer: str
    role: Role | None = None
    collectors: tuple[Collector, ...] = ()


def make_app(services: Services) -> FastAPI:
    """Build the application; its lifespan starts and stops the engine's thread."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine, role = services.front.engine, services.role
        engine.start()
        if role is not None:
            role.start(engine.wake)
        yield
        await run_in_threadpool(engine.stop, ENGINE_STOP_TIMEOUT_S)
        if role is not None:
            await run_in_threadpool(role.close)

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    _add_operations(app, services)
    _add_models(app, services)
    if services.role is None or services.role.name == "decode":
        _add_generation(app, services)
    _add_error_handlers(app)
    return app


def _add_operations(app: FastAPI, services: Services) -> None:
    registry = make_registry(
        MetricsCollector(
            services.front,
            verification=services.verification,
            proposer=services.proposer,
            model=services.served.name,
        )
    )
    for collector in services.collectors:
        registry.register(collector)
    if services.role is not None:
        registry.register(services.role.collector())

    @app.get("/health")
    async def health() -> Response:
        front, role = services.front, services.role
        state = "ok"
        if not front.engine.is_alive:
            state = "engine stopped"
        elif (fault := front.engine.problem) is not None:
            state = fault.oneline()
        elif front.is_stopping:
            state = "stopping"
        elif role is not None and (problem := role.problem()) is not None:
            state = problem
        document: dict[str, object] = {"status": state}
        if role is not None:
            document |= {"role": role.name, "serves": role.serves, "peers": role.states()}
        return json_response(document, 200 if state == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(metrics_text(registry), media_type=CONTENT_TYPE)

    @app.get("/info")
    async def info() -> Response:
        return json_response(services.info())

    @app.post("/flush_cache")
    async def flush_cache() -> Response:
        await asyncio.wrap_future(services.front.engine.flush())
        return json_response({"status": "flushed"})


def _add_models(app: FastAPI, services: Services) -> None:
    served = services.served
    model = {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "specctl",
        "max_model_len": served.max_model_len,
    }

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def model_by_name(name: str) -> Response:
        check_model(name, served)
        return json_response(model)


def _add_generation(app: FastAPI, services: Services) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        parsed = parse_completion(decode_body(await _read_body(request)))
        response_id = f"cmpl-{uuid.uuid4().hex}"
        prepared = await run_in_threadpool(prepare_completion, parsed, services.served, response_id)
        return _generate(services, "completions", response_id, parsed.options, prepared)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        parsed = parse_chat(decode_body(await _read_body(request)))
        response_id = f"chatcmpl-{uuid.uuid4().hex}"
        prepared = await run_in_threadpool(prepare_chat, parsed, services.served, response_id)
        return _generate(services, "chat", response_id, parsed.options, prepared)


def _generate(
    services: Services,
    endpoint: Endpoint,
    response_id: str,
    options: RequestOptions,
    prepared: Prepared,
) -> Response:
    envelope = Envelope(
        endpoint=endpoint,
        response_id=response_id,
        created=int(time.time()),
        model=services.served.name,
        fingerprint=services.served.fingerprint,
        seed=prepared.seed,
        has_token_ids=options.return_token_ids,
        has_logprobs=options.num_logprobs is not None,
        tokenizer=services.served.tokenizer,
    )
    return GenerationResponse(
        services.front.submit(prepared.inputs),
        envelope,
        num_requests=len(prepared.inputs),
        num_choices=prepared.num_choices,
        is_stream=options.stream,
        has_usage=options.include_usage,
    )


async def _read_body(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise DiagnosticError(
                diagnose(
                    "SD917",
                    where="body#",
                    message="the body is too large",
                    expected=f"at most {MAX_BODY_BYTES} bytes",
                    found=f"{size} bytes or more",
                )
            )
        parts.append(part)
    return b"".join(parts)


def _add_error_handlers(app: FastAPI) -> None:
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, DiagnosticError), "registered for these"
        return error_response(error.diagnostics)

    async def unrouted(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for these"
        place = f"{request.method} {request.url.path}"
        diagnostic = diagnose(
            "SD918",
            where=place,
            message=f"there is no `{place}`",
            expected=", ".join(f"`{route}`" for route in ROUTES),
            found=f"`{place}`",
        )
        response = error_response((diagnostic,))
        response.status_code = error.status_code
        return response

    async def failed(request: Request, error: Exception) -> Response:
        return error_response(  # the traceback goes to the server log when this is re-raised
            (
                diagnose(
                    "SD916",
                    where=f"{request.method} {request.url.path}",
                    message=f"the server failed: {type(error).__name__}: {error}",
                ),
            )
        )

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=400)  # nobody is left to read it

    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(DiagnosticError, refused)
    app.add_exception_handler(HTTPException, unrouted)
    app.add_exception_handler(Exception, failed)
