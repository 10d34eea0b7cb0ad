"""Find what there is to validate below a path: checkpoint directories and manifest files.

Invariants: a directory is a checkpoint when it holds config.json or weight files, and is not walked
further; any other directory is walked in sorted order. A file is a manifest when it is named, or in
a walk when it is YAML and has a `schema_version` key. Hidden entries are skipped; links to
directories are followed only when named.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MANIFEST_SUFFIXES = (".yaml", ".yml", ".json")
EXPECTATION_NAME = "expected.yaml"
_WEIGHT_SUFFIXES = (
    ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf"
)  # fmt: skip
_HAS_VERSION = re.compile(r"^schema_version\s*:", re.MULTILINE)
_SNIFF_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One thing to validate.

    Args:
        path: as the user would type it.
    """

    path: str
    kind: Literal["checkpoint", "manifest"]


def discover(source: str, *, listed: frozenset[str] = frozenset()) -> tuple[Found, ...]:
    """Return what is at or below `source`, in a fixed order.

    A source that is nothing of the kind is returned as a checkpoint: opening it says what is wrong.

    Args:
        source: a checkpoint, a manifest, or a directory that holds some.
        listed: absolute paths that count as found whatever they look like.
    """
    path = Path(source)
    if path.is_file() and path.suffix in MANIFEST_SUFFIXES:
        return (Found(path=source, kind="manifest"),)
    itself = (Found(path=source, kind="checkpoint"),)
    is_walkable = bool(source.strip()) and path.is_dir() and os.access(path, os.R_OK | os.X_OK)
    if not is_walkable or is_checkpoint(path):
        return itself
    return tuple(_walk(path, listed)) or itself


def is_checkpoint(directory: Path) -> bool:
    """Tell whether a directory holds a config or weights itself."""
    return any(
        name == "config.json" or name.endswith(_WEIGHT_SUFFIXES)
        for name, is_directory in _entries(directory)
        if not is_directory
    )


def _entries(directory: Path) -> list[tuple[str, bool]]:
    """Return names and whether each is a directory, sorted; a linked directory is none."""
    with os.scandir(directory) as entries:
        return sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)


def _walk(directory: Path, listed: frozenset[str]) -> Iterator[Found]:
    for name, is_directory in _entries(directory):
        path = directory / name
        if name.startswith("."):
            continue
        is_listed = str(path.absolute()) in listed
        if not is_directory:
            if path.is_file() and (is_listed or _is_manifest(path)):
                yield Found(path=str(path), kind="manifest")
        elif is_listed or not os.access(path, os.R_OK | os.X_OK) or is_checkpoint(path):
            yield Found(path=str(path), kind="checkpoint")  # an unreadable one is reported there
        else:
            yield from _walk(path, listed)


def _is_manifest(path: Path) -> bool:
    if path.suffix not in (".yaml", ".yml") or path.name == EXPECTATION_NAME:
        return False
    with path.open("rb") as stream:
        head = stream.read(_SNIFF_BYTES)
    return _HAS_VERSION.search(head.decode("utf-8", "replace")) is not None
