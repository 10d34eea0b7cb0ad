"""Write a planned checkpoint: weights, config, side files and provenance, checked, then in place.

Invariants: the result is read again before it appears. The same plan gives the same bytes, so that
an output that is there already and equal is left alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specctl.checkpoint import Checkpoint
from specctl.contract.file_names import CONFIG, INDEX
from specctl.convert.directory import (
    PROVENANCE,
    check_apart,
    check_replaceable,
    check_space,
    new_directory,
    write_file_synced,
)
from specctl.convert.files import is_same_file, write_file
from specctl.convert.layout import Layout, json_bytes
from specctl.convert.provenance import tensor_table
from specctl.convert.reading import CHUNK_BYTES, Moved, SourceFiles
from specctl.formats.written import Origin


@dataclass(frozen=True, kw_only=True, slots=True)
class SideFile:
    """A file beside the weights that is copied as it is."""

    origin: Origin
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything an output directory will hold.

    Args:
        checkpoints: the sources by origin.
        config: bytes of config.json.
        layout: weight files and index.
        side_files: name in the output -> file of a source.
        record: the provenance without the tensors.
    """

    checkpoints: Mapping[Origin, Checkpoint]
    config: bytes
    layout: Layout
    side_files: Mapping[str, SideFile]
    record: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of the output.

    Args:
        state: `unchanged` when it was there already, byte for byte.
        files: names, sorted.
        size_bytes: of the weight files.
    """

    state: Literal["written", "unchanged"]
    files: tuple[str, ...]
    size_bytes: int


def write(
    plan: Plan,
    out: Path,
    *,
    is_forced: bool,
    has_digests: bool,
    check: Callable[[Path], None],
    moved: Moved = lambda count: None,
) -> Outcome:
    """Write the plan to `out`.

    Args:
        plan: what to write.
        out: the directory; its parents are made.
        is_forced: replace a directory that specctl wrote.
        has_digests: write the digest of every tensor into the provenance.
        check: reads the finished directory and raises when it is not right.
        moved: told the bytes read, for a progress bar.

    Raises:
        DiagnosticError: SD603, SD604, SD605, SD606, and what `check` and the sources raise.
    """
    check_apart(out, plan.checkpoints.values())
    outcome = Outcome(
        state="written", files=tuple(sorted(_names(plan))), size_bytes=plan.layout.size
    )
    with SourceFiles(plan.checkpoints, moved=moved) as sources:
        if is_same(plan, out, sources):
            return Outcome(state="unchanged", files=outcome.files, size_bytes=outcome.size_bytes)
        check_replaceable(out, is_forced=is_forced)
        check_space(out, plan.layout.size)
        with new_directory(out) as directory:
            digests: dict[str, str] = {}
            for file in plan.layout.files:
                digests |= write_file(directory, file, sources, has_digests=has_digests)
            _write_small_files(plan, directory, digests)
            sources.check_unchanged()
            check(directory)
    return outcome


def _names(plan: Plan) -> set[str]:
    names = {file.name for file in plan.layout.files}
    names |= {CONFIG, PROVENANCE, *plan.side_files}
    return names if plan.layout.index is None else names | {INDEX}


def _write_small_files(plan: Plan, directory: Path, digests: Mapping[str, str]) -> None:
    if plan.layout.index is not None:
        write_file_synced(directory / INDEX, plan.layout.index)
    write_file_synced(directory / CONFIG, plan.config)
    for name, side in plan.side_files.items():
        with (directory / name).open("xb") as stream:
            for data in _side_bytes(plan, side):
                stream.write(data)
    is_stitch = plan.record["command"] == "stitch"
    table = tensor_table(plan.layout, digests, is_draft_only=is_stitch)
    record = {**plan.record, "files": sorted(_names(plan)), "tensors": table}
    write_file_synced(directory / PROVENANCE, json_bytes(record))


def _side_bytes(plan: Plan, side: SideFile) -> Iterator[bytes]:
    with plan.checkpoints[side.origin].store.open(side.name) as stored:
        for begin in range(0, stored.size, CHUNK_BYTES):
            yield stored.read_at(begin, min(begin + CHUNK_BYTES, stored.size))


def is_same(plan: Plan, out: Path, sources: SourceFiles) -> bool:
    """Tell whether `out` holds exactly what the plan writes; digests are not asked for again."""
    if not out.is_dir() or {path.name for path in out.iterdir()} != _names(plan):
        return False
    small: dict[str, bytes] = {CONFIG: plan.config}
    if plan.layout.index is not None:
        small[INDEX] = plan.layout.index
    return (
        all((out / name).read_bytes() == data for name, data in small.items())
        and _is_same_record(plan, out / PROVENANCE)
        and all(_is_same_side(plan, side, out / name) for name, side in plan.side_files.items())
        and all(is_same_file(out / file.name, file, sources) for file in plan.layout.files)
    )


def _is_same_record(plan: Plan, path: Path) -> bool:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    if not isinstance(found, dict):
        return False
    for name in ("files", "tensors"):
        found.pop(name, None)
    return bool(found == json.loads(json.dumps(plan.record)))


def _is_same_side(plan: Plan, side: SideFile, path: Path) -> bool:
    with path.open("rb") as stream:
        is_same = all(stream.read(len(data)) == data for data in _side_bytes(plan, side))
        return is_same and not stream.read(1)
