"""Diagnostics as HTTP errors in OpenAI's shape.

Invariants: the first diagnostic gives message, `param` and `code`; all of them are under
`diagnostics`; the status of a code is data in `HTTP_STATUS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import msgspec

from specctl.contract.diagnostics import Diagnostic

HTTP_STATUS: MappingProxyType[str, int] = MappingProxyType(
    {
        "SD855": 503,
        "SD856": 503,
        "SD860": 503,
        "SD861": 503,
        "SD862": 503,
        "SD863": 503,
        "SD864": 504,
        "SD866": 503,
        "SD907": 404,
        "SD914": 429,
        "SD915": 503,
        "SD916": 500,
        "SD917": 413,
        "SD918": 404,
    }
)
"""Statuses other than 400, by code."""

ERROR_TYPES: MappingProxyType[int, str] = MappingProxyType(
    {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"}
)
"""OpenAI's `type` by status; `invalid_request_error` for the rest."""

BODY_PREFIX = "body#/"


def http_status(diagnostic: Diagnostic) -> int:
    """Return the status of a diagnostic; a code outside family 9 is our fault."""
    return HTTP_STATUS.get(diagnostic.code, 400 if diagnostic.code.startswith("SD9") else 500)


def error_param(diagnostic: Diagnostic) -> str | None:
    """Return the request field a diagnostic points at, such as `messages[0].role`."""
    if not diagnostic.where.startswith(BODY_PREFIX):
        return None
    first, *rest = diagnostic.where.removeprefix(BODY_PREFIX).split("/")
    return first + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in rest)


def error_object(diagnostics: Sequence[Diagnostic]) -> dict[str, object]:
    """Build `{"error": {...}}` of one or more diagnostics."""
    first = diagnostics[0]
    return {
        "error": {
            "message": _sentence(first) + _more(len(diagnostics) - 1),
            "type": ERROR_TYPES.get(http_status(first), "invalid_request_error"),
            "param": error_param(first),
            "code": first.code,
            "diagnostics": [msgspec.to_builtins(item) for item in diagnostics],
        }
    }


def _sentence(diagnostic: Diagnostic) -> str:
    numbers = [
        f"{word} {value}"
        for word, value in (("expected", diagnostic.expected), ("found", diagnostic.found))
        if value is not None
    ]
    suffix = f" ({', '.join(numbers)})" if numbers else ""
    return f"{diagnostic.message}{suffix}"


def _more(count: int) -> str:
    return f"; and {count} more under `diagnostics`" if count else ""
