"""A repository of the Hugging Face hub, through `huggingface_hub`.

Invariants: login, cache, mirror (HF_ENDPOINT), proxy and timeouts are the client's; ranged reads go
through its HTTP session, which leaves the login out when a redirect leads to another host. The
client is imported when an adapter is made, never before. Both of its HTTP libraries are known:
httpx under version 1, httpx2 under version 2.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specctl.checkpoint.sources.hub import HubError, HubName, Listing, Reply, Trouble, status_error
from specctl.contract.file_names import CONFIG, INDEX, PICKLE_SINGLE, SINGLE

_MARKERS = (CONFIG, SINGLE, INDEX, PICKLE_SINGLE)
_HTTP_LIBRARIES = ("httpx", "httpx2")


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
            yield from self._response.iter_bytes()  # as it comes: a cut loses nothing
        except self._http.TimeoutException as error:
            raise HubError("unreachable", f"no byte of {self._what} came in time") from error
        except self._http.HTTPError as error:
            raise HubError("cut", f"the connection ended while reading {self._what}") from error


class HuggingFaceHub:
    """One repository of the Hugging Face hub or of a mirror of it."""

    def __init__(self, name: HubName) -> None:
        """Import the client; nothing is asked yet.

        Args:
            name: the repository.

        Raises:
            HubError: `client` when the library cannot be imported.
        """
        self.name = name
        try:
            self._hub: Any = importlib.import_module("huggingface_hub")
            self._constants: Any = importlib.import_module("huggingface_hub.constants")
            self._errors: Any = importlib.import_module("huggingface_hub.errors")
        except ImportError as error:
            raise HubError(
                "client",
                f"`huggingface_hub` cannot be imported: {error}",
                expected="huggingface_hub 1.0 or later",
            ) from error
        self._endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or self._constants.ENDPOINT
        self._timeout_s = float(self._constants.HF_HUB_DOWNLOAD_TIMEOUT)
        self._http = self._http_library()

    def _http_library(self) -> Any:
        """Return the module of the session's class, which holds the exceptions it raises."""
        for kind in type(self._hub.get_session()).__mro__:
            library = kind.__module__.partition(".")[0]
            if library in _HTTP_LIBRARIES:
                return importlib.import_module(library)
        raise HubError(
            "client",
            "the HTTP session of `huggingface_hub` is of an unknown kind",
            expected=" or ".join(_HTTP_LIBRARIES),
            found=type(self._hub.get_session()).__module__,
        )

    @property
    def is_offline(self) -> bool:
        """Tell whether HF_HUB_OFFLINE forbids every connection."""
        return bool(self._constants.HF_HUB_OFFLINE)

    def listing(self) -> Listing:
        """Return the files at the commit that the revision names; one request."""
        api = self._hub.HfApi(endpoint=self._endpoint)
        what = f"`{self.name.text(self.name.revision)}`"
        try:
            info = api.model_info(
                self.name.repository,
                revision=self.name.revision,
                files_metadata=True,
                timeout=self._timeout_s,
            )
        except (self._errors.HfHubHTTPError, self._http.HTTPError, self._http.InvalidURL) as error:
            raise self._meaning(error, what) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            # The client builds its answer from JSON without checking it; a web page or the JSON of
            # another kind of server ends in one of these.
            raise HubError(
                "answer", f"`{self._endpoint}` does not answer as a hub", expected="a model's JSON"
            ) from error
        files = info.siblings or []
        return Listing(
            revision=info.sha or self.name.revision or "main",
            pinned=info.sha,
            sizes={f.rfilename: f.size for f in files if isinstance(f.rfilename, str)},
        )

    def _meaning(self, error: Exception, what: str) -> HubError:
        response = getattr(error, "response", None)
        if response is not None and response.status_code >= 400:
            if response.status_code == 404 and "x-error-code" not in response.headers:
                # A mirror may leave the code out; a web page comes from something else.
                is_page = "html" in response.headers.get("content-type", "")
                trouble: Trouble = "answer" if is_page else "repository"
                return HubError(trouble, f"`{self._endpoint}` answers 404 for {what}")
            return status_error(response.status_code, response.headers, what)
        if isinstance(error, self._http.TimeoutException):
            return HubError("unreachable", f"`{self._endpoint}` does not answer in time")
        is_late = isinstance(error, (self._http.ReadError, self._http.RemoteProtocolError))
        return HubError(
            "unreachable",
            f"no connection to `{self._endpoint}`: {error or type(error).__name__}",
            is_passing=is_late,
        )

    @contextmanager
    def stream(self, path: str, revision: str, begin: int, end: int) -> Iterator[Reply]:
        """Ask for a range; see `Hub.stream`."""
        url = self._hub.hf_hub_url(
            self.name.repository, path, revision=revision, endpoint=self._endpoint
        )
        headers = {
            **self._hub.utils.build_hf_headers(),
            "Range": f"bytes={begin}-{end - 1}",
            "Accept-Encoding": "identity",  # a compressed answer has other offsets
        }
        session = self._hub.get_session()
        try:
            with session.stream(
                "GET", url, headers=headers, timeout=self._timeout_s, follow_redirects=True
            ) as response:
                yield _StreamedReply(response, self._http, f"`{path}`")
        except self._http.TooManyRedirects as error:
            raise HubError("answer", f"the server redirects `{path}` without end") from error
        except (self._http.HTTPError, self._http.InvalidURL) as error:
            raise HubError("unreachable", f"no answer for `{path}`: {error}") from error

    def cached(self, path: str, revision: str) -> Path | None:
        """Return the cached file of this commit."""
        found = self._hub.try_to_load_from_cache(self.name.repository, path, revision=revision)
        return Path(found) if isinstance(found, str) else None

    def download(self, path: str, revision: str) -> Path:
        """Download into the client's cache; it resumes and verifies on its own."""
        # Asked for by its name, so that the cache remembers which commit the name meant and
        # `--offline` finds it; by commit when the name has moved on.
        found = self._download(path, self.name.revision or "main")
        return found if revision in found.parts else self._download(path, revision)

    def _download(self, path: str, revision: str) -> Path:
        try:
            found = self._hub.hf_hub_download(
                self.name.repository,
                path,
                revision=revision,
                endpoint=self._endpoint,
                etag_timeout=self._timeout_s,
            )
        except self._errors.LocalEntryNotFoundError as error:
            raise HubError("unreachable", f"`{path}` cannot be downloaded: {error}") from error
        except (self._errors.HfHubHTTPError, self._http.HTTPError, self._http.InvalidURL) as error:
            raise self._meaning(error, f"`{path}`") from error
        except (OSError, RuntimeError, ValueError) as error:  # disk full, size or digest differs
            raise HubError("cut", f"`{path}` cannot be downloaded: {error}") from error
        return Path(found)

    def snapshot(self) -> tuple[Path, str | None]:
        """Return the cached snapshot of the revision, complete or not."""
        revision = self.name.revision or "main"
        for marker in _MARKERS:
            found = self.cached(self.name.path_of(marker), revision)
            if found is not None:
                root = found.parent
                depth = self.name.subfolder.count("/") + 1 if self.name.subfolder else 0
                return root, (root.parents[depth - 1] if depth else root).name
        option = "" if self.name.revision is None else f" --revision {revision}"
        raise HubError(
            "offline",
            f"`{self.name.text(self.name.revision)}` is not in the cache",
            expected=f"a snapshot of `{revision}` in `{self._constants.HF_HUB_CACHE}`",
            found="none",
            help="Download it while there is a network: `hf download "
            f"{self.name.repository}{option}`",
        )
