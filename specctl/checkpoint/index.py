"""Read a shard index and hold it against what the shards really contain.

Invariants: file names from an index are untrusted; only a plain relative path that stays inside
the checkpoint's directory is ever opened. The index decides which files belong to the checkpoint.
*Source:* Hugging Face shard index: `{"metadata": {"total_size": n}, "weight_map": {key: file}}`.
"""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from specctl.checkpoint.json_text import read_object
from specctl.checkpoint.sources.store import FileStore
from specctl.checkpoint.tensor_entry import TensorEntry, place, shown
from specctl.contract.findings import Findings

MAX_SHARDS = 10_000
"""The largest published checkpoints have some hundreds; each name costs a look at the disk."""
_MAX_NAME = 1024
_MAX_MISSING_LISTED = 20
SHARD_NAME = re.compile(r"(.*)-(\d{1,6})-of-(\d{1,6})\.(safetensors|bin)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Index:
    """A shard index whose names were checked.

    Args:
        file: the index file's name.
        weight_map: tensor name -> shard name, usable entries only.
        shards: shard names that may be opened and exist, in order of first appearance.
        total_size: bytes of all tensors as stated, None when not stated.
    """

    file: str
    weight_map: Mapping[str, str]
    shards: tuple[str, ...]
    total_size: int | None


def read_index(store: FileStore, file: str, findings: Findings) -> Index | None:
    """Return the index `file` of `store`, or None when nothing in it can be used.

    Diagnostics: SD102, SD127, SD128, SD130 and those of reading JSON.
    """
    table, _ = read_object(store, file, findings)
    if table is None:
        return None
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        findings.add(
            "SD127",
            where=f"{file}#/weight_map",
            message="the index has no `weight_map` with entries",
            expected="an object of tensor names to file names",
            found="missing" if "weight_map" not in table else shown(reprlib.repr(weight_map)),
        )
        return None
    usable = _texts(weight_map, file, findings)
    counts = Counter(usable.values())
    if len(counts) > MAX_SHARDS:
        findings.add(
            "SD127",
            where=f"{file}#/weight_map",
            message=f"the index names {len(counts)} different files",
            expected=f"at most {MAX_SHARDS}",
            found=len(counts),
        )
        return None
    bad = _names_outside(store, usable, counts, file, findings)
    if bad:
        usable = {key: shard for key, shard in usable.items() if shard not in bad}
        counts = Counter(usable.values())
    missing = [shard for shard in counts if not store.has(shard)]
    _report_missing(missing, counts, file, findings)
    gone = set(missing)
    shards = tuple(shard for shard in counts if shard not in gone)
    _check_shard_count(file, counts, findings)
    metadata = table.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    is_total = isinstance(total, (int, float)) and not isinstance(total, bool) and total == total
    stated = int(total) if is_total and abs(total) != float("inf") else None  # type: ignore[arg-type]
    return Index(file=file, weight_map=usable, shards=shards, total_size=stated)


def _texts(weight_map: dict[str, Any], file: str, findings: Findings) -> dict[str, str]:
    """Return the entries whose file name is text; report the others."""
    if set(map(type, weight_map.values())) == {str}:
        return weight_map
    for key, shard in weight_map.items():
        if not isinstance(shard, str):
            findings.add(
                "SD127",
                where=f"{file}#/weight_map/{_pointer(key)}",
                message="the file name is not text",
                found=shown(reprlib.repr(shard)),
            )
    return {key: shard for key, shard in weight_map.items() if isinstance(shard, str)}


def _names_outside(
    store: FileStore, usable: Mapping[str, str], names: Iterable[str], file: str, findings: Findings
) -> set[str]:
    """Return the file names that must not be opened, each reported at the first key that has it."""
    reasons = {name: reason for name in names if (reason := why_outside(store, name)) is not None}
    if not reasons:
        return set()
    first: dict[str, str] = {}
    for key, name in usable.items():
        first.setdefault(name, key)
    for name, reason in reasons.items():
        findings.add(
            "SD128",
            where=f"{file}#/weight_map/{_pointer(first[name])}",
            message=f"the file name `{shown(name)}` {reason}",
            expected="a file inside the checkpoint's directory",
            found=shown(name),
        )
    return set(reasons)


def _pointer(key: str) -> str:
    return shown(key).replace("~", "~0").replace("/", "~1")


def why_outside(store: FileStore, name: str) -> str | None:
    """Return why a file name of an index must not be opened in `store`, None when it may be."""
    pure = PurePosixPath(name)
    if not name or "\x00" in name or "\\" in name:
        return "is not a file name"
    if pure.is_absolute() or ":" in name:
        return "is an absolute path"
    if ".." in pure.parts:
        return "climbs out of the directory"
    if len(name) > _MAX_NAME:
        return "is longer than a path can be"
    return store.why_outside(name)


def _report_missing(
    missing: list[str], counts: Mapping[str, int], file: str, findings: Findings
) -> None:
    listed = missing[:_MAX_MISSING_LISTED]
    rest = len(missing) - len(listed)
    for place_in_list, shard in enumerate(listed, 1):
        is_last = rest > 0 and place_in_list == len(listed)
        findings.add(
            "SD102",
            where=shown(shard),
            message=f"`{file}` places {counts[shard]} tensors in `{shown(shard)}`, "
            "which is not there",
            expected=f"a file with {counts[shard]} tensors",
            found="no file",
            notes=(f"{rest} more files that `{file}` names are missing",) if is_last else (),
        )


def _check_shard_count(file: str, counts: Mapping[str, int], findings: Findings) -> None:
    promised: dict[int, int] = {}
    for shard in counts:
        match = SHARD_NAME.fullmatch(shard)
        if match is not None:
            number = int(match[3])
            promised[number] = promised.get(number, 0) + 1
    for number, present in sorted(promised.items()):
        if number != present:
            findings.add(
                "SD130",
                where=f"{file}#/weight_map",
                message=f"shard names say `of {number}`, the index names {present} such files",
                expected=number,
                found=present,
            )


def reconcile(
    index: Index,
    stored: Iterable[list[TensorEntry]],
    findings: Findings,
    *,
    is_listed: bool = True,
) -> dict[str, TensorEntry]:
    """Return tensor name -> entry as the index means it.

    Args:
        index: the checked index.
        stored: the entries of every shard that could be read.
        findings: receives SD104, SD125, SD126 and SD129.
        is_listed: false when there is no index and only double tensors are of interest.

    Returns:
        Every stored tensor once, those the index forgets included (SD126 says so), so that a
        forgotten tensor is not reported as missing as well.
    """
    tensors: dict[str, TensorEntry] = {}
    total = 0
    num_right = 0
    read_files: set[str] = set()
    for entries in stored:
        if not entries:
            continue
        file = entries[0].file
        read_files.add(file)
        total += sum([entry.end - entry.begin for entry in entries])
        keys = [entry.key for entry in entries]
        num_right += list(map(index.weight_map.get, keys)).count(file)
        if tensors.keys().isdisjoint(keys):
            tensors.update(zip(keys, entries, strict=True))
        else:
            table = dict(zip(keys, entries, strict=True))
            _settle_doubles(table, tensors, index.weight_map, findings)
            tensors.update(table)
    if is_listed:
        if not len(tensors) == len(index.weight_map) == num_right:
            _check_listing(index, tensors, read_files, findings)
        _check_total(index, total, findings)
    return tensors


def _settle_doubles(
    table: dict[str, TensorEntry],
    tensors: Mapping[str, TensorEntry],
    weight_map: Mapping[str, str],
    findings: Findings,
) -> None:
    """Report SD104 and leave in `table` only what replaces the entries read before."""
    for key in [key for key in table if key in tensors]:
        entry, other = table[key], tensors[key]
        findings.add(
            "SD104",
            where=entry.describe(),
            message=f"`{shown(key)}` is stored in `{other.file}` and in `{entry.file}`",
            expected="one file",
            found="two files",
        )
        if weight_map.get(key) != entry.file:
            del table[key]


def _check_listing(
    index: Index, tensors: Mapping[str, TensorEntry], read_files: set[str], findings: Findings
) -> None:
    """Report tensors the index forgets (SD126) and places it gets wrong (SD125)."""
    weight_map = index.weight_map
    for key, entry in tensors.items():
        if key not in weight_map:
            findings.add(
                "SD126",
                where=entry.describe(),
                message=f"`{index.file}` does not name this tensor",
                expected=f"`{entry.file}` in weight_map",
                found="no entry",
            )
    for key, shard in weight_map.items():
        stored = tensors.get(key)
        if (stored is not None and stored.file == shard) or shard not in read_files:
            continue  # right, or the whole shard is reported already
        found = "no file that was read" if stored is None else f"`{stored.file}`"
        findings.add(
            "SD125",
            where=place(shard, key),
            message=f"`{index.file}` places this tensor here; it is in {found}",
            expected=f"`{shard}`",
            found=found,
        )


def _check_total(index: Index, total: int, findings: Findings) -> None:
    is_whole = len(index.shards) == len(set(index.weight_map.values()))
    if index.total_size is not None and is_whole and index.total_size != total:
        findings.add(
            "SD129",
            where=f"{index.file}#/metadata/total_size",
            message=f"states {index.total_size} bytes, the tensors add up to {total}",
            expected=total,
            found=index.total_size,
        )
