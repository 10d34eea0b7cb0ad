"""Settings of the HTTP side: what was given, what follows, and from where. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from runtime.server.role_settings import RoleOptions
from specctl.contract.diagnostics import DiagnosticError, diagnose

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULT_GRACE_S = 30.0
DEFAULT_LOG_LEVEL = "info"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """What a command line gave; None: not given. Meanings are those of `ServeSettings`."""

    host: str | None = None
    port: int | None = None
    model_name: str | None = None
    grace_s: float | None = None
    log_level: str | None = None
    role: RoleOptions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """Where, under which name and how long to serve.

    Args:
        host: address to listen on; the default is this machine only.
        port: 0 takes a free one; the log names it.
        model_name: id under /v1/models; the default is the target directory's name.
        grace_s: seconds that running requests have after SIGTERM.
        log_level: `debug`, `info`, `warning` or `error`.
    """

    host: str
    port: int
    model_name: str
    grace_s: float
    log_level: str

    def described(self, options: ServeOptions) -> dict[str, dict[str, object]]:
        """Return each value with its origin, for `/info`."""
        return {
            item.name: {
                "value": getattr(self, item.name),
                "origin": "default" if getattr(options, item.name) is None else "given",
            }
            for item in fields(self)
        } | (
            {}
            if options.role is None
            else {"role": {"value": options.role.described(), "origin": "given"}}
        )


def settle(options: ServeOptions, *, target_name: str) -> ServeSettings:
    """Fill in the defaults.

    Raises:
        DiagnosticError: SD832, no name.
    """
    if options.model_name == "":
        raise DiagnosticError(
            diagnose(
                "SD832",
                where="--served-model-name",
                message="`served_model_name` is empty, and clients ask for a model by its name",
                expected="one character or more",
                found="none",
            )
        )
    return ServeSettings(
        host=DEFAULT_HOST if options.host is None else options.host,
        port=DEFAULT_PORT if options.port is None else options.port,
        model_name=target_name if options.model_name is None else options.model_name,
        grace_s=DEFAULT_GRACE_S if options.grace_s is None else options.grace_s,
        log_level=DEFAULT_LOG_LEVEL if options.log_level is None else options.log_level,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteOptions:
    """Settings of a router, all of them known.

    Args:
        decode: `host:port` of each decode server.
        health_interval_s: between two looks at a server's `/health`.
        health_timeout_s: for a server to answer that look, and to take a connection.
        grace_s: seconds that open requests have after SIGTERM.
    """

    decode: tuple[str, ...]
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    health_interval_s: float = 1.0
    health_timeout_s: float = 5.0
    grace_s: float = DEFAULT_GRACE_S
    log_level: str = DEFAULT_LOG_LEVEL
