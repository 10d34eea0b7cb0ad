"""Checkpoints as bytes, on disk and on hubs: headers, indexes, pickles, atomic writes.

Imports neither torch nor numpy; the pickle reader is imported only when there is a pickle.
"""

from __future__ import annotations

from pathlib import Path

from specctl.checkpoint.checkpoint import Checkpoint, digest_file
from specctl.checkpoint.directory import DEFAULT_ACCESS, Access, open_checkpoint
from specctl.checkpoint.source import resolve_source
from specctl.checkpoint.sources.hub import is_hub_source
from specctl.checkpoint.tensor_entry import DTYPE_BITS, TensorEntry, tensor_place
from specctl.checkpoint.writing import atomic_write, write_safetensors, write_text_atomic

__all__ = [
    "DEFAULT_ACCESS",
    "DTYPE_BITS",
    "Access",
    "Checkpoint",
    "TensorEntry",
    "atomic_write",
    "digest_file",
    "is_hub_source",
    "open_checkpoint",
    "read_pt_ints",
    "resolve_source",
    "tensor_place",
    "write_safetensors",
    "write_text_atomic",
]


def read_pt_ints(path: Path | str) -> tuple[int, ...]:
    """Return the integers of a `.pt` list or 1-d tensor; see `pt_list.read_pt_ints`."""
    from specctl.checkpoint import pt_list

    return pt_list.read_pt_ints(path)
