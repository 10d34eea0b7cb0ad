"""Read byte ranges of a hub's files: resume what was cut, wait when told to, never take it all.

Invariants: a range is asked for at most `ATTEMPTS` times and waits are bounded, so that no server
can make a command hang; a server that ignores ranges is never read further than `SKIP_BYTES` before
the wanted range.
*Source:* RFC 9110, sections 14 (range requests) and 10.2.3 (Retry-After).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from specctl.checkpoint.sources.hub import Hub, HubError, Reply, status_error

ATTEMPTS = 5
MAX_WAIT_S = 60.0
SKIP_BYTES = 1 << 20
_FIRST_WAIT_S = 0.5
_LONGEST_OWN_WAIT_S = 8.0
_SLOWEST_BYTES_PER_S = 10_000
_PATIENCE_S = 60.0
_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(\d{1,18}|\*)")

T = TypeVar("T")
Pause = Callable[[float], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Got:
    """The bytes of a range, fewer when the file ends earlier, and the file's size when told."""

    data: bytes
    size: int | None


def with_retries(attempt: Callable[[], T], pause: Pause) -> T:
    """Return `attempt()`, tried again after troubles that may pass.

    Args:
        attempt: raises HubError.
        pause: waits for a number of seconds.

    Raises:
        HubError: the last one; at once when it cannot pass or asks for a wait above `MAX_WAIT_S`.
    """
    own_wait_s = _FIRST_WAIT_S
    for _ in range(ATTEMPTS - 1):
        try:
            return attempt()
        except HubError as error:
            wait_s = own_wait_s if error.retry_after_s is None else error.retry_after_s
            if not error.is_passing or wait_s > MAX_WAIT_S:
                raise
            pause(wait_s)
            own_wait_s = min(own_wait_s * 2, _LONGEST_OWN_WAIT_S)
    return attempt()


def read_range(
    hub: Hub, path: str, revision: str, begin: int, end: int, *, pause: Pause = time.sleep
) -> Got:
    """Return the bytes [begin, end) of a file; a cut connection goes on where it ended.

    Raises:
        HubError: whatever is left after the last attempt.
    """
    parts = bytearray()
    size: int | None = None

    def attempt() -> None:
        nonlocal size
        start = begin + len(parts)
        with hub.stream(path, revision, start, end) as reply:
            size = _take(reply, path, start, end, parts)

    with_retries(attempt, pause)
    return Got(data=bytes(parts), size=size)


def _take(reply: Reply, path: str, start: int, end: int, parts: bytearray) -> int | None:
    """Append the wanted bytes of one answer to `parts`; return the file's size when told."""
    if reply.status == 416:  # the file ends before `start`
        stated = _CONTENT_RANGE.fullmatch(reply.headers.get("content-range", ""))
        return int(stated[3]) if stated is not None and stated[3] != "*" else start
    if reply.status == 206:
        skip, size = 0, _total(reply, path, start)
    elif reply.status == 200:
        skip, size = start, _length(reply)
        if start > SKIP_BYTES:
            raise HubError(
                "ranges",
                f"the server ignores the range and offers all of `{path}`",
                expected="206 with the range",
                found=f"200 with {'all' if size is None else size} bytes",
            )
    else:
        raise status_error(reply.status, reply.headers, f"`{path}`")
    wanted = end - start if size is None else max(0, min(end, size) - start)
    got = _copy(reply, skip, wanted, parts)
    if got < wanted and not (size is None and reply.status == 200):
        raise HubError(
            "cut",
            f"the connection ended {wanted - got} bytes early while reading `{path}`",
            expected=f"{wanted} bytes from {start}",
            found=f"{got} bytes",
        )
    return start + got if size is None and got < wanted else size


def _copy(reply: Reply, skip: int, wanted: int, parts: bytearray) -> int:
    """Append up to `wanted` bytes after the first `skip`; leave the rest unread."""
    got = 0
    if wanted <= 0:
        return 0
    deadline = time.monotonic() + _PATIENCE_S + (skip + wanted) / _SLOWEST_BYTES_PER_S
    for chunk in reply.chunks():
        piece = chunk[skip:] if skip else chunk
        skip = max(0, skip - len(chunk))
        piece = piece[: wanted - got]
        parts += piece
        got += len(piece)
        if got == wanted:
            break
        if time.monotonic() > deadline:
            raise HubError("unreachable", f"fewer than {_SLOWEST_BYTES_PER_S} bytes a second")
    return got


def _total(reply: Reply, path: str, start: int) -> int | None:
    stated = reply.headers.get("content-range", "")
    match = _CONTENT_RANGE.fullmatch(stated)
    if match is None or match[1] is None or int(match[1]) != start:
        raise HubError(
            "answer",
            f"the server gives another range of `{path}` than the one asked for",
            expected=f"bytes from {start}",
            found=stated or "no Content-Range",
        )
    return None if match[3] == "*" else int(match[3])


def _length(reply: Reply) -> int | None:
    stated = reply.headers.get("content-length", "")
    is_plain = reply.headers.get("content-encoding", "identity") == "identity"
    return int(stated) if is_plain and re.fullmatch(r"\d{1,18}", stated) else None
