"""Starts the HTTP server and stops it gracefully.

Shutdown: at SIGTERM or SIGINT the listening socket closes and new requests on open connections get
503; running requests have the grace time to finish; what is left then ends with an SD915 error
event and `[DONE]`; the exit status is 0. A second SIGINT ends the grace time, a third one waits for
nothing.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from runtime.server.app import Services, make_app
from runtime.server.front import Front
from runtime.server.settings import ServeSettings
from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.contract.signals import INTERRUPTS, handled

_AFTER_GRACE_S = 5.0  # for the last events to reach slow clients


def serve_http(services: Services, settings: ServeSettings) -> None:
    """Serve until a signal ends it; returns after a graceful shutdown.

    Raises:
        SystemExit: the port is taken (uvicorn logs which).
    """
    config = uvicorn.Config(
        make_app(services),
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=int(settings.grace_s + _AFTER_GRACE_S),
    )
    _Server(config, services.front, grace_s=settings.grace_s).run()


def check_address(host: str, port: int) -> None:
    """Bind the address once and let it go, so that a taken port is known before a model loads.

    Raises:
        DiagnosticError: SD835.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in found:
            socket.create_server(address[:2], family=family).close()
    except (OSError, UnicodeError) as error:
        is_port = getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES)
        raise DiagnosticError(
            diagnose(
                "SD835",
                where="--port" if is_port else "--host",
                message="the server cannot listen at this address",
                expected="a free port of an address of this machine",
                found=f"{host}:{port}: {getattr(error, 'strerror', None) or error}",
            )
        ) from error


class QuietServer(uvicorn.Server):
    """uvicorn without raising the signal again at the end: the exit status is 0."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving; uvicorn would raise them again and exit by signal."""
        with handled(INTERRUPTS, self.handle_exit):
            yield


class _Server(QuietServer):
    """Drains the engine before it ends."""

    def __init__(self, config: uvicorn.Config, front: Front, *, grace_s: float) -> None:
        super().__init__(config)
        self._front = front
        self._grace_s = grace_s
        self._is_hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; at a second Ctrl-C end what runs, at a third one leave it as it is."""
        if self.should_exit and sig == signal.SIGINT and not self._is_hurried:
            self._is_hurried = True
            self._front.end_all("before a second Ctrl-C")
            return
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the door, give running requests their grace, then end them."""
        self._front.close_admission()
        timer = asyncio.get_running_loop().call_later(
            self._grace_s, self._front.end_all, f"within the {self._grace_s:g} s of grace"
        )
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
