"""From what the user wrote as SOURCE to its files; what hubs need is imported for hubs only."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.checkpoint.source import resolve_source
from specctl.checkpoint.sources.local import LocalStore
from specctl.checkpoint.sources.store import FileStore
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.digests import is_hub_source

if TYPE_CHECKING:
    from specctl.checkpoint.sources.hub import Hub, HubName


def open_store(
    source: Path | str, *, offline: bool = False, pause: Callable[[float], None] = time.sleep
) -> FileStore:
    """Return the files that a source means; asks a hub for its list of files.

    Args:
        source: a directory, `hf:org/name[@revision][/subfolder]` or the same with `ms:`.
        offline: open no connection; a hub source is read from the client's cache.
        pause: waits between attempts, seconds.

    Raises:
        DiagnosticError: SD119, SD120 for a path, SD136 to SD147 for a hub source.
    """
    if not isinstance(source, str) or not is_hub_source(source):
        return LocalStore(resolve_source(source))
    from specctl.checkpoint.sources.hub import HubError, parse_hub_name

    name = parse_hub_name(source)
    try:
        return _open_hub(name, offline, pause)
    except HubError as error:
        raise DiagnosticError(error.diagnostic(source, name.kind)) from error


def _client(name: HubName) -> Hub:
    if name.kind == "hf":
        from specctl.checkpoint.sources.huggingface import HuggingFaceHub

        return HuggingFaceHub(name)
    from specctl.checkpoint.sources.modelscope import ModelScopeHub

    return ModelScopeHub(name)


def _open_hub(name: HubName, offline: bool, pause: Callable[[float], None]) -> FileStore:
    from specctl.checkpoint.sources.hub import HubError
    from specctl.checkpoint.sources.ranges import with_retries
    from specctl.checkpoint.sources.remote import RemoteStore

    hub = _client(name)
    if offline or hub.is_offline:
        root, revision = hub.snapshot()
        return LocalStore(root, identity=name.text(revision), revision=revision)
    store = RemoteStore(hub, with_retries(hub.listing, pause), pause=pause)
    if not store.sizes():
        raise HubError(
            "file",
            f"`{name.subfolder}` is not a directory of the repository"
            if name.subfolder
            else "the repository holds no files",
            expected="config.json and weights",
            found="no files",
        )
    return store
