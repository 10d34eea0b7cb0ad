"""Find what there is to validate below a path: checkpoint directories and manifest files.

Invariants: a directory is a checkpoint when it holds config.json or weight files, and is not walked
further; any other directory is walked in sorted order. A file of a checkpoint that is named stands
for its directory; a named YAML file is a manifest, and so is a JSON file that is no part of a
checkpoint; in a walk only a YAML file with a `schema_version` key. A JSON list, a `.pt` list beside
no config, and what `build-token-map` wrote are token maps; its directory stands for its maps.
Patterns (`*`, `?`, `[...]`, `**`) that the shell left alone are expanded here. Hidden entries are
skipped; links to directories are followed only when named. Whatever is found in two ways is
returned once.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specctl.contract.file_names import CONFIG
from specctl.ops.token_map_check import is_token_map, map_files

_YAML = (".yaml", ".yml")
EXPECTATION_NAME = "expected.yaml"
_WEIGHT_SUFFIXES = (
    ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf"
)  # fmt: skip
_HAS_VERSION = re.compile(r'^(?:schema_version|\s*\{?\s*"schema_version")\s*:', re.MULTILINE)
_SNIFF_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One thing to validate.

    Args:
        path: as the user would type it.
    """

    path: str
    kind: Literal["checkpoint", "manifest", "token_map"]


def discover_all(
    sources: Iterable[str], *, listed: frozenset[str] = frozenset()
) -> tuple[Found, ...]:
    """Return what is at or below every source, each once, at its first place.

    Args:
        sources: as for `discover`.
        listed: absolute paths that count as found whatever they look like.
    """
    found: dict[str, Found] = {}
    for source in sources:
        for item in discover(source, listed=listed):
            found.setdefault(os.path.abspath(item.path), item)  # noqa: PTH100  (lexical)
    return tuple(found.values())


def discover(source: str, *, listed: frozenset[str] = frozenset()) -> tuple[Found, ...]:
    """Return what is at or below `source`, in a fixed order.

    A source that is nothing of the kind is returned as a checkpoint: opening it says what is wrong,
    and a pattern among them (`is_pattern`) matched nothing.

    Args:
        source: a checkpoint or a file of one, a manifest, a directory that holds some, or a pattern
            of such names.
        listed: absolute paths that count as found whatever they look like.
    """
    itself = (Found(path=source, kind="checkpoint"),)
    if is_pattern(source):
        names = sorted(glob.glob(source, recursive=True))  # noqa: PTH207  (one call for `**` too)
        return tuple(item for name in names for item in _matched(Path(name), listed)) or itself
    path = Path(source)
    if path.is_file():
        return _named_file(path, source) or itself
    if not source.strip() or not _is_walkable(path):
        return itself
    maps = _maps(path)
    if maps or is_checkpoint(path):
        return maps or itself
    return tuple(_walk(path, listed)) or itself


def is_pattern(source: str) -> bool:
    """Tell whether a source is a pattern: it has a wildcard, and nothing has this name."""
    return glob.has_magic(source) and not os.path.lexists(source)


def _named_file(path: Path, source: str) -> tuple[Found, ...]:
    """Return the checkpoint that a file belongs to, or the manifest or token map that it is."""
    if is_token_map(path):
        return (Found(path=source, kind="token_map"),)
    manifest = (Found(path=source, kind="manifest"),)
    if path.suffix in _YAML or path.name == "manifest.json":
        return manifest
    is_json = path.suffix == ".json"
    is_inside = _is_walkable(path.parent) and is_checkpoint(path.parent)
    if is_inside and not (is_json and has_version(path)):
        return (Found(path=str(path.parent), kind="checkpoint"),)
    return manifest if is_json else ()


def _matched(path: Path, listed: frozenset[str]) -> Iterator[Found]:
    """Return what a name that a pattern matched stands for; other files are passed over."""
    if path.is_file():
        if _is_manifest(path):
            yield Found(path=str(path), kind="manifest")
        else:
            yield from (item for item in _named_file(path, str(path)) if item.kind != "manifest")
    elif _is_walkable(path):
        maps = _maps(path)
        if maps:
            yield from maps
        elif is_checkpoint(path):
            yield Found(path=str(path), kind="checkpoint")
        else:
            yield from _walk(path, listed)


def _maps(directory: Path) -> tuple[Found, ...]:
    """Return the maps of a directory, and those that another run put below it, one for a size."""
    paths = list(map_files(directory))
    if paths:
        below = (directory / name for name, is_directory in _entries(directory) if is_directory)
        paths += (item for path in below if _is_walkable(path) for item in map_files(path))
    return tuple(Found(path=str(path), kind="token_map") for path in paths)


def _is_walkable(path: Path) -> bool:
    return path.is_dir() and os.access(path, os.R_OK | os.X_OK)


def is_checkpoint(directory: Path) -> bool:
    """Tell whether a directory holds a config or weights itself."""
    return any(
        name == CONFIG or name.endswith(_WEIGHT_SUFFIXES)
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
        elif is_listed or not os.access(path, os.R_OK | os.X_OK):
            yield Found(path=str(path), kind="checkpoint")  # an unreadable one is reported there
        elif maps := _maps(path):
            yield from maps
        elif is_checkpoint(path):
            yield Found(path=str(path), kind="checkpoint")
        else:
            yield from _walk(path, listed)


def _is_manifest(path: Path) -> bool:
    if path.suffix not in _YAML or path.name == EXPECTATION_NAME:
        return False
    return has_version(path)


def has_version(path: Path) -> bool:
    """Tell whether a YAML or JSON file has the key that every manifest has, near its begin."""
    try:
        with path.open("rb") as stream:
            head = stream.read(_SNIFF_BYTES)
    except OSError:
        return False
    return _HAS_VERSION.search(head.decode("utf-8", "replace")) is not None
