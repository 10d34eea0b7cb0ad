"""Turn what the user wrote as SOURCE into a directory on this disk.

The seam for hub sources: a later reader adds a download here, callers keep one signature.
"""

from __future__ import annotations

import re
from pathlib import Path

from specctl.contract.diagnostics import DiagnosticError, diagnose

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_HUB_URLS = ("https://", "http://", "hf://", "ms://", "hf:", "ms:")


def resolve_source(source: Path | str) -> Path:
    """Return the directory that `source` names.

    Raises:
        DiagnosticError: SD119 when there is no such directory, SD120 for a hub id or URL.
    """
    text = str(source)
    if not text.strip():
        raise DiagnosticError(
            diagnose(
                "SD119",
                where="SOURCE",
                message="the path is empty, as an unset shell variable makes it",
                expected="a directory with config.json and weights",
                found="no characters",
            )
        )
    path = Path(text)
    try:
        path = path.expanduser()
        is_there, is_directory = path.exists(), path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # too long, NUL byte, unknown ~user
        raise DiagnosticError(
            diagnose("SD119", where=_place(text), message=f"not a usable path: {error}")
        ) from error
    if is_directory:
        return path
    if is_there:
        raise DiagnosticError(
            diagnose(
                "SD119",
                where=_place(text),
                message="this is a file; a checkpoint is read from its directory",
                expected="a directory with config.json and weights",
                found="a file",
                help=f"Pass the directory: `{path.parent}`",
            )
        )
    if isinstance(source, str) and (text.startswith(_HUB_URLS) or _HUB_ID.fullmatch(text)):
        name = text.partition("@")[0].rstrip("/")
        directory = name.rpartition("/")[2] or "checkpoint"
        raise DiagnosticError(
            diagnose(
                "SD120",
                where=_place(text),
                message="no such directory; it looks like a hub id, and only local directories "
                "are read in this version",
                help=f"Download it first: `hf download {name} --local-dir {directory}`, "
                f"then pass `{directory}`",
            )
        )
    raise DiagnosticError(
        diagnose(
            "SD119",
            where=_place(text),
            message="no such directory",
            expected="a directory with config.json and weights",
            found="nothing at this path",
        )
    )


def _place(text: str) -> str:
    return (text.encode("unicode_escape").decode("ascii") or ".")[:400]
