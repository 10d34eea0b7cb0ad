"""A repository of ModelScope, through `modelscope-hub`, the hub part of the `modelscope` package.

Invariants: as in `huggingface.py`. ModelScope names files by branch or tag and gives no commit, so
the revision that is recorded is that name; the manifest's digests pin the contents.
*Source:* modelscope-hub 0.5: HubApi.list_repo_files, LegacyClient.download_stream, download_file.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specctl.checkpoint.sources.hub import HubError, HubName, Listing, Reply, status_error

DEFAULT_REVISION = "master"
_MODEL = "model"
_SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] [\w ,-]+")  # inside a text of the HTTP library
_OLDEST = (0, 5)
_NEEDED = "modelscope 1.40 with modelscope-hub 0.5.1, or later"
_CHUNK_BYTES = 8192  # what a cut connection loses of the bytes that came


class _StreamedReply:
    """An answer of the client's session."""

    def __init__(self, response: Any, http: Any, what: str) -> None:
        self._response = response
        self._http = http
        self._what = what
        self.status: int = response.status_code
        self.headers: Mapping[str, str] = response.headers

    def chunks(self) -> Iterator[bytes]:
        """Yield the body."""
        try:
            yield from self._response.iter_content(_CHUNK_BYTES)
        except self._http.RequestException as error:
            if isinstance(error, self._http.Timeout) or "timed out" in str(error):
                raise HubError("unreachable", f"no byte of {self._what} came in time") from error
            raise HubError("cut", f"the connection ended while reading {self._what}") from error


class ModelScopeHub:
    """One repository of ModelScope or of a mirror of it."""

    def __init__(self, name: HubName) -> None:
        """Import the client; nothing is asked yet.

        Args:
            name: the repository.

        Raises:
            HubError: `client` when the library cannot be imported.
        """
        self.name = name
        try:
            self._client: Any = importlib.import_module("modelscope_hub")
            self._errors: Any = importlib.import_module("modelscope_hub.errors")
            self._http: Any = importlib.import_module("requests.exceptions")
        except ImportError as error:
            raise HubError(
                "client",
                f"the ModelScope client cannot be imported: {error}",
                expected=_NEEDED,
            ) from error
        version = str(self._client.__version__)
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
            raise HubError(
                "client",
                "the ModelScope client is too old: its streams repeat requests on their own",
                expected=_NEEDED,
                found=f"modelscope-hub {version}",
            )
        self._api = self._new_api(None)

    @property
    def is_offline(self) -> bool:
        """Return False: the client has no setting for it, `--offline` is ours."""
        return False

    def _new_api(self, endpoint: str | None) -> Any:
        with warnings.catch_warnings():
            # MODELSCOPE_DOMAIN is what its users set; that it has a newer name is not ours to say.
            warnings.simplefilter("ignore", FutureWarning)
            # A configuration of its own: the client's default is made once for a process.
            return self._client.HubApi(config=self._client.HubConfig(endpoint=endpoint))

    def listing(self) -> Listing:
        """Return the files of the branch or tag; the client retries on its own."""
        revision = self.name.revision or DEFAULT_REVISION
        what = f"`{self.name.text(self.name.revision)}`"
        try:
            endpoint = self._api.resolve_endpoint_for_read(self.name.repository)
            self._api = self._new_api(endpoint)
            entries = self._api.list_repo_files(self.name.repository, _MODEL, revision=revision)
        except self._errors.NotExistError as error:
            raise self._missing(revision, what) from error
        except (self._errors.HubError, self._http.RequestException) as error:
            raise self._meaning(error, what) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # As for Hugging Face: JSON of another kind of server, used by the client unchecked.
            raise _no_hub() from error
        return Listing(
            revision=revision,
            pinned=revision,
            sizes={entry.path: entry.size for entry in entries if entry.type != "tree"},
        )

    def _missing(self, revision: str, what: str) -> HubError:
        """Return which of the two is missing: the client's error says the same for both."""
        try:
            known = self._api.list_repo_revisions(self.name.repository, _MODEL)
        except (self._errors.HubError, self._http.RequestException, ValueError, AttributeError):
            return HubError("repository", f"the hub answers 404 for {what}")
        names = [str(entry.get("Revision")) for entry in known if isinstance(entry, dict)]
        if not names or revision in names:
            return HubError("repository", f"the hub answers 404 for {what}")
        return HubError(
            "revision",
            f"the hub answers 404 for {what}",
            expected="one of " + ", ".join(names[:8]),
            found=revision,
        )

    def _meaning(self, error: Exception, what: str) -> HubError:
        status = getattr(error, "status_code", None)
        if isinstance(status, int) and status >= 400:
            wait = getattr(error, "retry_after", None)
            headers = {} if wait is None else {"retry-after": str(wait)}
            return status_error(status, headers, what)
        if isinstance(error, self._http.InvalidJSONError):
            return _no_hub()
        cause = _SYSTEM_ERROR.search(str(error))
        reason = str(error).partition("\n")[0][:200] if cause is None else cause[0]
        return HubError(
            "unreachable",
            f"no answer of `{self._api.legacy.endpoint}` for {what}: {reason}",
            is_passing=False,
        )

    @contextmanager
    def stream(self, path: str, revision: str, begin: int, end: int) -> Iterator[Reply]:
        """Ask for a range; see `Hub.stream`."""
        headers = {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
        try:
            response = self._api.legacy.download_stream(
                self.name.repository, _MODEL, path, revision, headers=headers
            )
        except self._errors.HubError as error:
            raise self._stream_error(error, path) from error
        except self._http.RequestException as error:
            raise HubError("unreachable", f"no answer for `{path}`: {error}") from error
        with response:
            yield _StreamedReply(response, self._http, f"`{path}`")

    def _stream_error(self, error: Exception, path: str) -> HubError:
        meaning = self._meaning(error, f"`{path}`")
        if meaning.trouble == "unreachable":
            return HubError("unreachable", meaning.detail)
        return meaning

    def cached(self, path: str, revision: str) -> Path | None:
        """Return None: the cache is filed by branch, and a branch moves on."""
        return None

    def download(self, path: str, revision: str) -> Path:
        """Download into the client's cache; it resumes on its own."""
        try:
            found = self._api.download_file(self.name.repository, _MODEL, path, revision=revision)
        except (self._errors.HubError, self._http.RequestException) as error:
            raise self._meaning(error, f"`{path}`") from error
        except (OSError, RuntimeError, ValueError) as error:  # disk full, size or digest differs
            raise HubError("cut", f"`{path}` cannot be downloaded: {error}") from error
        return Path(found)

    def snapshot(self) -> tuple[Path, str | None]:
        """Return the cached directory of the branch or tag, complete or not."""
        revision = self.name.revision
        option = "" if revision is None else f" --revision {revision}"
        try:
            found = self._api.download_repo(
                self.name.repository, _MODEL, revision=revision, local_files_only=True
            )
        except (self._errors.HubError, OSError, ValueError) as error:
            raise HubError(
                "offline",
                f"`{self.name.text(revision)}` is not in the cache",
                expected="a snapshot in the cache of ModelScope",
                found="none",
                help="Download it while there is a network: `modelscope download --model "
                f"{self.name.repository}{option}`",
            ) from error
        root = Path(found)
        is_filed = root.parent.name == "snapshots"
        below = root / self.name.subfolder if self.name.subfolder else root
        return below, root.name if is_filed else revision


def _no_hub() -> HubError:
    return HubError("answer", "the server does not answer as a hub", expected="a list of files")
