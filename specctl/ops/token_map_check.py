"""Judge a token map file: entries, end ids, padding, order, and whether it is what it says it is.

Rule: a repeated entry is an error where a head's rows follow the list (`d2t`), a warning in a plain
list: SGLang then reads a row twice, vLLM drops the repeat; files that FR-Spec published have some.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from specctl.checkpoint import digest_file
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.draft import TargetCheckpoint
from specctl.tokenmap.files import (
    JSON_FILE,
    PROVENANCE_FILE,
    PT_FILE,
    SAFETENSORS_FILE,
    SUFFIXES,
    Provenance,
    check_ids,
    find_provenance,
    read_entries,
)

_LISTS = (".json", ".pt", ".pth")
_SAME_ORDER = (JSON_FILE, PT_FILE, SAFETENSORS_FILE)
_LIST_HELP = (
    "`specctl cut-token-map FILE --tokenizer TARGET` writes it again, each id once and end ids in"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMapFile:
    """One map file as read.

    Args:
        path: as the user wrote it.
        ids_target: entries in draft-id order, None when the file cannot be read.
        provenance: what is stored about its origin.
    """

    path: str
    ids_target: tuple[int, ...] | None
    provenance: Provenance | None
    diagnostics: tuple[Diagnostic, ...]


def is_token_map(path: Path) -> bool:
    """Tell whether a file is a token map, by its content and by what lies beside it.

    A JSON list; a `.pt` list in a directory that is no checkpoint; a file that the provenance file
    beside it lists; safetensors with nothing but `d2t` and `t2d`.
    """
    if path.suffix not in SUFFIXES or path.name == PROVENANCE_FILE or not path.is_file():
        return False
    if path.suffix == ".json":
        with path.open("rb") as stream:
            return stream.read(256).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if find_provenance(path) is not None:
        return True
    if path.suffix == ".safetensors":
        return _holds_a_map_only(path)
    return not (path.parent / "config.json").exists()


def map_files(directory: Path) -> tuple[Path, ...]:
    """Return the maps of a directory that `build-token-map` wrote; none for another directory."""
    if not (directory / PROVENANCE_FILE).is_file() or (directory / "config.json").exists():
        return ()
    return tuple(path for path in sorted(directory.iterdir()) if is_token_map(path))


def _holds_a_map_only(path: Path) -> bool:
    from specctl.checkpoint.safetensors_header import read_header
    from specctl.checkpoint.sources import LocalStore
    from specctl.contract.findings import Findings

    entries, _ = read_header(LocalStore(path.parent), path.name, Findings())
    names = {entry.key for entry in entries}
    return "d2t" in names and names <= {"d2t", "t2d"}


def check_token_map(path: str, target: TargetCheckpoint | None) -> TokenMapFile:
    """Return a map and everything that is wrong with it.

    Diagnostics: SD402, SD404, SD405, SD406, SD420, SD436, SD437, SD438, SD441, and family 1 codes
    of a file that cannot be read.

    Args:
        path: the file.
        target: whose vocabulary it selects from; None: only what the map itself says is checked.
    """
    file = Path(path)
    provenance = find_provenance(file)
    try:
        ids_target = read_entries(file)
    except DiagnosticError as error:
        found = tuple(_placed(item, file) for item in error.diagnostics)
        return TokenMapFile(path=path, ids_target=None, provenance=provenance, diagnostics=found)
    found = (
        *_entries(ids_target, file, target, provenance),
        *_end_ids(ids_target, file, target),
        *_padding(ids_target, file, target, provenance),
        *_order(ids_target, file),
        *_origin(file, target, provenance),
    )
    return TokenMapFile(path=path, ids_target=ids_target, provenance=provenance, diagnostics=found)


def _placed(item: Diagnostic, file: Path) -> Diagnostic:
    """Return a finding whose place begins with the path and not with the bare name."""
    if str(file) == file.name or not item.where.startswith(file.name):
        return item
    return msgspec.structs.replace(item, where=f"{file.parent}/{item.where}")


def _entries(
    ids_target: Sequence[int],
    file: Path,
    target: TargetCheckpoint | None,
    provenance: Provenance | None,
) -> Iterator[Diagnostic]:
    size = None if target is None else target.vocab_size
    if size is None and provenance is not None:
        size = provenance.target_vocab_size
    for item in check_ids(ids_target, where=str(file), target_vocab_size=size):
        if item.code == "SD404" and file.suffix in _LISTS:
            yield msgspec.structs.replace(item, severity="warning", help=_LIST_HELP)
        else:
            yield item


def _end_ids(
    ids_target: Sequence[int], file: Path, target: TargetCheckpoint | None
) -> Iterator[Diagnostic]:
    wanted = () if target is None else target.eos_token_ids
    held = frozenset(ids_target)
    missing = [token for token in wanted if token not in held]
    if missing:
        yield diagnose(
            "SD406",
            where=f"{file}#",
            message=f"end ids {missing} are not in the map",
            expected=f"all of {list(wanted)}",
            found=f"without {missing}",
            help=_LIST_HELP,
        )


def _padding(
    ids_target: Sequence[int],
    file: Path,
    target: TargetCheckpoint | None,
    provenance: Provenance | None,
) -> Iterator[Diagnostic]:
    size = None if target is None else target.tokenizer_size
    rows = None if target is None else target.vocab_size
    if size is None and provenance is not None:
        size, rows = provenance.tokenizer_size, provenance.target_vocab_size
    if size is None or rows is None:
        return
    inside = [(place, token) for place, token in enumerate(ids_target) if size <= token < rows]
    if inside:
        place, token = inside[0]
        yield diagnose(
            "SD438",
            where=f"{file}#/{place}",
            message=f"{len(inside)} of {len(ids_target)} entries are rows without a token; the "
            f"first is entry {place}, id {token}",
            expected=f"ids below the tokenizer's {size}",
            found=f"rows up to {rows - 1}",
        )


def _order(ids_target: Sequence[int], file: Path) -> Iterator[Diagnostic]:
    """Say that a list is not ascending, and that files of one map disagree."""
    if file.suffix in _LISTS and not file.name.startswith("freq_"):
        place = next(
            (i for i in range(1, len(ids_target)) if ids_target[i] < ids_target[i - 1]), None
        )
        if place is not None:
            yield diagnose(
                "SD441",
                where=f"{file}#/{place}",
                message=f"entry {place} is id {ids_target[place]}, after {ids_target[place - 1]}",
                expected="ascending ids",
                found="another order",
            )
    if file.name not in _SAME_ORDER or file.name == JSON_FILE:
        return
    first = file.with_name(JSON_FILE)
    if not first.is_file():
        return
    try:
        others = read_entries(first)
    except DiagnosticError:  # reported where that file is judged
        return
    if others != tuple(ids_target):
        num_equal = sum(a == b for a, b in zip(ids_target, others, strict=False))
        yield diagnose(
            "SD437",
            where=str(file),
            message=f"it is another map than `{JSON_FILE}` beside it",
            expected=f"the {len(others)} ids of `{JSON_FILE}` in their order",
            found=f"{len(ids_target)} ids, {num_equal} of them in the same place",
        )


def _origin(
    file: Path, target: TargetCheckpoint | None, provenance: Provenance | None
) -> Iterator[Diagnostic]:
    if provenance is None:
        return
    stated = provenance.files.get(file.name)
    if stated is not None:
        digest = digest_file(file, where=str(file))
        if digest != stated:
            yield diagnose(
                "SD437",
                where=str(file),
                message=f"its bytes are not those that `{provenance.file}` describes",
                expected=stated,
                found=digest,
            )
    wanted = None if target is None else target.tokenizer_digest
    if wanted is not None and provenance.tokenizer_digest not in (None, wanted):
        yield diagnose(
            "SD436",
            where=f"{file.parent / provenance.file}#/tokenizer_digest",
            message=f"`{file.name}` was made with another tokenizer than the target's",
            expected=wanted,
            found=provenance.tokenizer_digest,
        )
