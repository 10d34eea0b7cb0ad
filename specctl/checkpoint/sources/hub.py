"""One repository of a hub: how a source names it, what its client offers, what can go wrong.

Invariants: an adapter (`huggingface.py`, `modelscope.py`) turns every exception of its client into
`HubError`; nothing above knows the client. Adapters open connections only when asked, and send the
login only through the client, which drops it when a redirect leads to another host.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

HubKind = Literal["hf", "ms"]
Trouble = Literal[
    "login",
    "repository",
    "revision",
    "file",
    "rate",
    "unreachable",
    "cut",
    "ranges",
    "answer",
    "offline",
    "client",
]
_CODES: dict[Trouble, str] = {
    "login": "SD136",
    "repository": "SD137",
    "revision": "SD138",
    "file": "SD139",
    "rate": "SD140",
    "unreachable": "SD141",
    "cut": "SD142",
    "ranges": "SD143",
    "answer": "SD144",
    "offline": "SD145",
    "client": "SD147",
}
_HELP: dict[tuple[Trouble, HubKind], str] = {
    ("login", "hf"): "Accept the terms on the repository's page if it has some, then "
    "`hf auth login`, or set HF_TOKEN",
    ("login", "ms"): "`modelscope login`, or set MODELSCOPE_API_TOKEN; ask the owner for access if "
    "that is not enough",
    ("unreachable", "hf"): "Check the network and HF_ENDPOINT; `--offline` reads the cache",
    ("unreachable", "ms"): "Check the network and MODELSCOPE_DOMAIN; `--offline` reads the cache",
    ("client", "hf"): "`pip install -U huggingface_hub`",
    ("client", "ms"): "`pip install 'specctl[modelscope]'`",
}
_OF_ONE_FILE = ("file", "ranges")
_PASSING = ("rate", "unreachable", "cut")
_PART = r"[A-Za-z0-9_][\w.-]{0,95}"
_SOURCE = re.compile(
    rf"(?P<kind>hf|ms):(?P<repository>{_PART}/{_PART})"
    r"(@(?P<revision>refs/(pr|convert)/[\w.%-]+|[\w.%+-]+))?(/(?P<subfolder>[^\s@\\\x00]+?))?/?"
)


class HubError(Exception):
    """What a hub, or the way to it, answered instead of the files."""

    def __init__(
        self,
        trouble: Trouble,
        detail: str,
        *,
        retry_after_s: float | None = None,
        is_passing: bool | None = None,
        expected: str | None = None,
        found: str | None = None,
        help: str | None = None,
    ) -> None:
        """Describe it.

        Args:
            trouble: what kind it is.
            detail: the message of the diagnostic.
            retry_after_s: when the server says to try again, in seconds from now.
            is_passing: whether another attempt may succeed; None: as the kind usually is.
            expected: what should have been there.
            found: what was there.
            help: what to do about it; None: what is usual for the trouble.
        """
        super().__init__(detail)
        self.trouble = trouble
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.is_passing = trouble in _PASSING if is_passing is None else is_passing
        self.expected = expected
        self.found = found
        self.help = help

    @property
    def is_of_one_file(self) -> bool:
        """Tell whether other files of the repository may still be read."""
        return self.trouble in _OF_ONE_FILE

    def diagnostic(self, where: str, kind: HubKind) -> Diagnostic:
        """Return the diagnostic at a place of a hub."""
        return diagnose(
            _CODES[self.trouble],
            where=where,
            message=self.detail,
            expected=self.expected,
            found=self.found,
            help=self.help or _HELP.get((self.trouble, kind)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HubName:
    """A repository as a source names it.

    Args:
        kind: `hf` or `ms`.
        repository: `org/name`.
        revision: branch, tag or commit, None for the hub's default.
        subfolder: path of the checkpoint in the repository, empty for its top.
    """

    kind: HubKind
    repository: str
    revision: str | None
    subfolder: str

    def text(self, revision: str | None) -> str:
        """Return the source's spelling with another revision."""
        at = "" if revision is None else f"@{revision.replace('/', '%2F')}"
        below = f"/{self.subfolder}" if self.subfolder else ""
        return f"{self.kind}:{self.repository}{at}{below}"

    def path_of(self, name: str) -> str:
        """Return the path in the repository of a file of the checkpoint."""
        return f"{self.subfolder}/{name}" if self.subfolder else name


def parse_hub_name(source: str) -> HubName:
    """Return the repository that a hub source names.

    A slash inside a revision is written `%2F`, but for `refs/pr/N` and `refs/convert/NAME`.

    Raises:
        DiagnosticError: SD146.
    """
    match = _SOURCE.fullmatch(source)
    subfolder = "" if match is None else (match["subfolder"] or "")
    if match is None or any(part in ("", ".", "..") for part in subfolder.split("/")[1:]):
        raise _malformed(source)
    if subfolder.split("/")[0] in (".", ".."):
        raise _malformed(source)
    revision = match["revision"]
    return HubName(
        kind="hf" if match["kind"] == "hf" else "ms",
        repository=match["repository"],
        revision=None if revision is None else revision.replace("%2F", "/").replace("%2f", "/"),
        subfolder=subfolder,
    )


def pinned_source(source: str, revision: str | None) -> str:
    """Return a hub source at another revision, unchanged when that is None.

    Raises:
        DiagnosticError: SD146.
    """
    name = parse_hub_name(source)
    return name.text(name.revision if revision is None else revision)


def _malformed(source: str) -> DiagnosticError:
    shown = source.encode("unicode_escape").decode("ascii")[:400]
    return DiagnosticError(
        diagnose(
            "SD146",
            where=shown,
            message="this is not the name of a repository on a hub",
            expected="hf:org/name[@revision][/subfolder], or ms: in front for ModelScope",
            found=shown,
        )
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The files of a repository at one revision.

    Args:
        revision: what files are asked for by; the commit where the hub resolves names to commits.
        pinned: what a manifest records, None when the hub does not say.
        sizes: path in the repository -> bytes, None where the hub does not say.
    """

    revision: str
    pinned: str | None
    sizes: Mapping[str, int | None]


class Reply(Protocol):
    """The answer to one request, body not read yet."""

    @property
    def status(self) -> int:
        """HTTP status after redirects."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the last answer, found whatever the case."""

    def chunks(self) -> Iterator[bytes]:
        """Yield the body; HubError `cut` or `unreachable` when the connection ends early."""


class Hub(Protocol):
    """One repository, through the hub's own client."""

    @property
    def name(self) -> HubName:
        """What the source said."""

    @property
    def is_offline(self) -> bool:
        """Tell whether the client's own settings forbid every connection."""

    def listing(self) -> Listing:
        """Resolve the revision and return the files.

        Raises:
            HubError: whatever went wrong.
        """

    def stream(
        self, path: str, revision: str, begin: int, end: int
    ) -> AbstractContextManager[Reply]:
        """Ask for the bytes [begin, end) of a file.

        Raises:
            HubError: the request got no answer; an answer with an error status is a `Reply`.
        """

    def cached(self, path: str, revision: str) -> Path | None:
        """Return the file in the client's cache when it is surely the same."""

    def download(self, path: str, revision: str) -> Path:
        """Download a file into the client's cache, or find it there.

        Raises:
            HubError: whatever went wrong.
        """

    def snapshot(self) -> tuple[Path, str | None]:
        """Return the cached directory of the repository and its revision; opens no connection.

        Raises:
            HubError: `offline` when it is not in the cache.
        """


def status_error(status: int, headers: Mapping[str, str], what: str) -> HubError:
    """Return what an error status of a hub means.

    Args:
        status: HTTP status, 400 or above.
        headers: of the answer; `X-Error-Code` tells missing things apart on Hugging Face.
        what: what was asked for, for the message.
    """
    code = headers.get("x-error-code", "")
    answer = f"the hub answers {status} for {what}"
    if status in (401, 403) and code != "RepoNotFound":
        gated = " (gated)" if code == "GatedRepo" else ""
        return HubError("login", f"{answer}{gated}")
    if status in (401, 404) and code == "RepoNotFound":
        return HubError("repository", answer)
    if status == 404:
        return HubError("revision" if code == "RevisionNotFound" else "file", answer)
    if status == 429:
        wait = retry_after_s(headers)
        told = "" if wait is None else f"; it says to wait {wait:g} s"
        return HubError("rate", answer + told, retry_after_s=wait)
    return HubError(
        "answer",
        answer,
        retry_after_s=retry_after_s(headers),
        is_passing=status in (408, 500, 502, 503, 504),
        expected="200 or 206",
        found=str(status),
    )


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of `Retry-After`, or of an exhausted `RateLimit`; None without either."""
    stated = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d+)?", stated):
        return float(stated)
    limit = re.search(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d{1,9})", headers.get("ratelimit", ""))
    return None if limit is None else float(limit[1])
