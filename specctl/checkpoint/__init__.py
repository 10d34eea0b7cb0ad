"""Checkpoints as bytes, on disk and on hubs: headers, indexes, pickles, atomic writes.

Imports neither torch nor numpy; the pickle reader is imported only when there is a pickle.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from specctl.checkpoint.checkpoint import Checkpoint, digest_file
from specctl.checkpoint.directory import DEFAULT_ACCESS, Access, open_checkpoint
from specctl.checkpoint.source import resolve_source
from specctl.checkpoint.sources.store import FileStore
from specctl.checkpoint.tensor_entry import DTYPE_BITS, WEIGHT_DTYPES, TensorEntry, tensor_place
from specctl.checkpoint.writing import (
    atomic_write,
    sync_directory,
    write_safetensors,
    write_text_atomic,
)
from specctl.contract.digests import is_hub_source

__all__ = [
    "DEFAULT_ACCESS",
    "DTYPE_BITS",
    "WEIGHT_DTYPES",
    "Access",
    "Checkpoint",
    "TensorEntry",
    "atomic_write",
    "digest_file",
    "is_hub_source",
    "local_copy",
    "open_checkpoint",
    "read_pt_ints",
    "resolve_source",
    "source_directory",
    "sync_directory",
    "tensor_place",
    "write_safetensors",
    "write_text_atomic",
]


def local_copy(store: FileStore, weights: Iterable[str]) -> Path:
    """Return a directory of this machine with a store's files; see `copying.local_copy`."""
    from specctl.checkpoint.sources import copying

    return copying.local_copy(store, weights)


def source_directory(source: Path | str, *, access: Access = DEFAULT_ACCESS) -> Path:
    """Return a directory of this machine with a source's small files, weights or not.

    Raises:
        DiagnosticError: SD119, SD120 for a path, SD136 to SD147 for a hub source.
    """
    if not isinstance(source, str) or not is_hub_source(source):
        return resolve_source(source)
    from specctl.checkpoint.sources.opening import open_store

    return local_copy(open_store(source, offline=access.offline), ())


def read_pt_ints(path: Path | str) -> tuple[int, ...]:
    """Return the integers of a `.pt` list or 1-d tensor; see `pt_list.read_pt_ints`."""
    from specctl.checkpoint import pt_list

    return pt_list.read_pt_ints(path)
