"""Read a shard index and hold it against what the shards really contain.

Invariants: file names from an index are untrusted; only a plain relative path that stays inside
the checkpoint's directory is ever opened. The index decides which files belong to the checkpoint.
*Source:* Hugging Face shard index: `{"metadata": {"total_size": n}, "weight_map": {key: file}}`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from specctl.checkpoint.findings import Findings
from specctl.checkpoint.json_text import read_object
from specctl.checkpoint.sources.store import FileStore
from specctl.checkpoint.tensor_entry import TensorEntry, place, printable

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
            found="missing" if "weight_map" not in table else printable(reprlib.repr(weight_map)),
        )
        return None
    usable: dict[str, str] = {}
    verdicts: dict[str, bool] = {}
    counts: dict[str, int] = {}
    for key, shard in weight_map.items():
        if not isinstance(shard, str):
            findings.add(
                "SD127",
                where=f"{file}#/weight_map/{_pointer(key)}",
                message="the file name is not text",
                found=printable(reprlib.repr(shard)),
            )
            continue
        if shard not in verdicts:
            verdicts[shard] = is_inside(store, shard, file=file, key=key, findings=findings)
        if verdicts[shard]:
            usable[key] = shard
            counts[shard] = counts.get(shard, 0) + 1
    shards = tuple(s for s in counts if _is_present(store, s, counts[s], file, findings))
    _check_shard_count(file, counts, findings)
    metadata = table.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    is_total = isinstance(total, (int, float)) and not isinstance(total, bool) and total == total
    stated = int(total) if is_total and abs(total) != float("inf") else None  # type: ignore[arg-type]
    return Index(file=file, weight_map=usable, shards=shards, total_size=stated)


def _pointer(key: str) -> str:
    return printable(key).replace("~", "~0").replace("/", "~1")


def is_inside(store: FileStore, name: str, *, file: str, key: str, findings: Findings) -> bool:
    """Tell whether `name` stays inside `store`; report SD128 when it does not."""
    reason: str | None = None
    pure = PurePosixPath(name)
    if not name or "\x00" in name or "\\" in name:
        reason = "is not a file name"
    elif pure.is_absolute() or ":" in name:
        reason = "is an absolute path"
    elif ".." in pure.parts:
        reason = "climbs out of the directory"
    elif len(name) > 1024:
        reason = "is longer than a path can be"
    else:
        reason = store.why_outside(name)
    if reason is None:
        return True
    findings.add(
        "SD128",
        where=f"{file}#/weight_map/{_pointer(key)}",
        message=f"the file name `{printable(name)}` {reason}",
        expected="a file inside the checkpoint's directory",
        found=printable(name),
    )
    return False


def _is_present(store: FileStore, shard: str, count: int, file: str, findings: Findings) -> bool:
    is_there = store.has(shard)
    if not is_there:
        findings.add(
            "SD102",
            where=printable(shard),
            message=f"`{file}` places {count} tensors in `{printable(shard)}`, which is not there",
            expected=f"a file with {count} tensors",
            found="no file",
        )
    return is_there


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
    weight_map = index.weight_map
    read_files: set[str] = set()
    for entries in stored:
        for entry in entries:
            key = entry.key
            total += entry.end - entry.begin
            read_files.add(entry.file)
            other = tensors.get(key)
            if other is None:
                tensors[key] = entry
                continue
            findings.add(
                "SD104",
                where=entry.describe(),
                message=f"`{printable(key)}` is stored in `{other.file}` and in `{entry.file}`",
                expected="one file",
                found="two files",
            )
            if weight_map.get(key) == entry.file:
                tensors[key] = entry
    if is_listed:
        _check_listing(index, tensors, read_files, findings)
        _check_total(index, total, findings)
    return tensors


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
