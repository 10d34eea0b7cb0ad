"""Bring the files of a checkpoint onto this machine, through the hub's client and its cache."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from specctl.checkpoint.sources.store import FileStore
from specctl.contract.diagnostics import DiagnosticError, diagnose

_WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ot", ".tflite"
)  # fmt: skip
_CODE_SUFFIXES = (".py", ".pyc", ".sh", ".so")
_WORKERS = 4


def local_copy(store: FileStore, weights: Iterable[str]) -> Path:
    """Return a directory of this machine with the weights and every small file of a store.

    Other weight files of the repository are left where they are, and so is code.

    Args:
        store: the files.
        weights: names of the weight files that are needed.

    Raises:
        DiagnosticError: what the hub answered, SD144 when its client scatters the files.
    """
    if store.root is not None:
        return store.root
    wanted = list(weights)
    wanted += [
        name
        for name in store.sizes()
        if not name.endswith((*_WEIGHT_SUFFIXES, *_CODE_SUFFIXES)) and name not in wanted
    ]
    with ThreadPoolExecutor(_WORKERS) as pool:
        paths = list(pool.map(store.fetch, wanted))
    roots = {path.parents[name.count("/")] for name, path in zip(wanted, paths, strict=True)}
    if len(roots) != 1:
        raise DiagnosticError(
            diagnose(
                "SD144",
                where=store.identity,
                message="the downloaded files lie in several directories: the repository changed",
                expected="one directory",
                found=", ".join(sorted(map(str, roots))[:3]),
            )
        )
    return roots.pop()
