"""`specctl route`."""

from __future__ import annotations

from typing import Annotated

import typer

from specctl.cli.shared_options import LogLevel, split_addresses


def route(
    decode: Annotated[
        str,
        typer.Option(
            "--decode", metavar="HOST:PORT,...", help="HTTP address of each decode server."
        ),
    ],
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on.", show_default=True)
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            "--port", min=0, max=65535, help="Port; 0 takes a free one.", show_default=True
        ),
    ] = 8000,
    health_interval_s: Annotated[
        float,
        typer.Option(
            "--health-interval-s",
            min=0.05,
            help="Seconds between two looks at a server's /health.",
            show_default=True,
        ),
    ] = 1.0,
    health_timeout_s: Annotated[
        float,
        typer.Option(
            "--health-timeout-s",
            min=0.05,
            help="Seconds for a server to answer them; three misses and it is lost.",
            show_default=True,
        ),
    ] = 5.0,
    grace_s: Annotated[
        float,
        typer.Option(
            "--grace-s", min=0, help="Seconds for open requests after SIGTERM.", show_default=True
        ),
    ] = 30.0,
    log_level: Annotated[
        LogLevel,
        typer.Option("--log-level", help="What goes to stderr.", show_default=True),
    ] = LogLevel.info,
) -> None:
    """Give clients one address in front of several decode servers.

    A request goes to the ready server with the fewest open ones, and to another one only while its
    client has not seen a byte.
    """
    from runtime import main

    main.route(
        main.RouteOptions(
            decode=split_addresses(decode, "--decode"),
            host=host,
            port=port,
            health_interval_s=health_interval_s,
            health_timeout_s=health_timeout_s,
            grace_s=grace_s,
            log_level=log_level.value,
        )
    )
