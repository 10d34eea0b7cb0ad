"""From `specctl route`'s options to a running router."""

from __future__ import annotations

import logging

import httpx
import uvicorn

from runtime.disagg.dialer import parse_address
from runtime.server.backends import Backends
from runtime.server.router import RouterState, make_router
from runtime.server.run import QuietServer, check_address
from runtime.server.settings import RouteOptions

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 2.0  # below the servers' own limit, so that no request meets a closing connection


def serve_route(options: RouteOptions) -> None:
    """Route until SIGTERM or SIGINT; see `runtime.main.route`.

    Raises:
        DiagnosticError: SD835, SD865.
    """
    for address in options.decode:
        parse_address(address, "--decode")
    check_address(options.host, options.port)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every look at /health
    client = httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=options.health_timeout_s),
        limits=httpx.Limits(keepalive_expiry=_KEEP_ALIVE_S),
        trust_env=False,
    )
    state = RouterState(backends=Backends(options.decode, client), client=client)
    app = make_router(
        state, interval_s=options.health_interval_s, timeout_s=options.health_timeout_s
    )
    logger.info("role router, decode servers %s", ", ".join(options.decode))
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        log_level=options.log_level,
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=int(options.grace_s),
    )
    QuietServer(config).run()
