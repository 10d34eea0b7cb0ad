"""Turn what the user wrote as SOURCE into a directory on this disk.

Hub sources never come here: `sources.opening` tells them by their prefix. What looks like one
without it is named (SD120), not guessed.
"""

from __future__ import annotations

import re
from pathlib import Path

from specctl.contract.diagnostics import DiagnosticError, diagnose

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_HUB_URL = re.compile(
    r"(?:https?://(?:www\.)?(?P<host>huggingface\.co|hf\.co|hf-mirror\.com|modelscope\.cn)/(?:models/)?"
    r"|(?P<scheme>hf|ms)://)(?P<id>[\w.-]+/[\w.-]+)"
)
_URLS = ("https://", "http://", "hf://", "ms://", "hf:", "ms:")


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
    if isinstance(source, str) and (text.startswith(_URLS) or _HUB_ID.fullmatch(text)):
        raise DiagnosticError(
            diagnose(
                "SD120",
                where=_place(text),
                message="no such directory; it looks like a repository of a hub",
                expected="a directory, or hf:org/name or ms:org/name",
                found=_place(text),
                help=_spelling(text),
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


def _spelling(text: str) -> str | None:
    """Return what to write instead, None when the text does not say enough."""
    url = _HUB_URL.match(text)
    if url is not None:
        is_modelscope = "modelscope" in (url["host"] or "") or url["scheme"] == "ms"
        return f"Write `{'ms' if is_modelscope else 'hf'}:{url['id']}`"
    if _HUB_ID.fullmatch(text):
        return f"Write `hf:{text}` for Hugging Face or `ms:{text}` for ModelScope"
    return None


def _place(text: str) -> str:
    return (text.encode("unicode_escape").decode("ascii") or ".")[:400]
