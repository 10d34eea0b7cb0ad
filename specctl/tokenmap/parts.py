"""Results of one task on disk, so that a stopped run goes on where it was.

A part is a safetensors file of our own: sparse id counts and distinct units of each group of
documents. It appears whole or not at all and names the run it belongs to.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specctl.checkpoint.writing import write_safetensors

_META = "specctl.part.2"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Group:
    """Documents whose counts are kept apart.

    Args:
        side: `counted` or `held_out`.
        domain: of the documents.
        language: of the documents.
    """

    side: str
    domain: str
    language: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """What one task found in one group.

    Args:
        num_documents: that ended in this task.
        num_text_bytes: of their pieces.
        ids: ascending target ids of texts that were encoded whole.
        id_counts: how often each occurs.
        units: distinct units that do not begin a document, one after another.
        ends: end offset of each in `units`, with a leading 0; int32.
        nums: occurrences of each; int64.
        firsts: distinct units that begin a document and their occurrences; used only where the
            first unit is encoded in another way.
        whole: texts that are still to be encoded as they stand.
    """

    num_documents: int
    num_text_bytes: int
    ids: array[int]
    id_counts: array[int]
    units: bytes
    ends: bytes
    nums: bytes
    firsts: tuple[bytes, bytes, bytes]
    whole: tuple[str, ...]

    @property
    def has_units(self) -> bool:
        """Whether something is still to be encoded."""
        return bool(self.nums or self.firsts[2] or self.whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSummary:
    """Numbers of one task that no group has.

    Args:
        num_documents: of all groups.
        digest_sum: sum of the documents' digests modulo 2^256.
        lowest: smallest split number of a document, None: no document.
        highest: largest one.
        defects: kind -> (how many, first place).
        num_disk_bytes: read, for progress.
    """

    num_documents: int = 0
    digest_sum: int = 0
    lowest: int | None = None
    highest: int | None = None
    defects: dict[str, tuple[int, str]]
    num_disk_bytes: int = 0


def part_path(directory: Path, number: int) -> Path:
    """Return where the part of a task lies."""
    return directory / f"part-{number:06d}.safetensors"


def write_part(path: Path, summary: PartSummary, groups: Mapping[Group, GroupResult]) -> None:
    """Write one part atomically."""
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    rows = []
    for number, group in enumerate(sorted(groups)):
        result = groups[group]
        rows.append([asdict(group), result.num_documents, result.num_text_bytes])
        blobs = (
            result.ids.tobytes(),
            result.id_counts.tobytes(),
            result.units,
            result.ends,
            result.nums,
            *result.firsts,
            json.dumps(result.whole).encode("ascii"),
        )
        for place, blob in enumerate(blobs):
            tensors[f"{number}.{place}"] = ("U8", (len(blob),), blob)
    facts = {**asdict(summary), "digest_sum": str(summary.digest_sum)}
    meta = json.dumps({"summary": facts, "groups": rows}, sort_keys=True)
    write_safetensors(path, tensors, {_META: meta})


def read_part(path: Path) -> tuple[PartSummary, dict[Group, GroupResult]] | None:
    """Return one part; None when it is missing or not whole, and the task is done again."""
    try:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        meta = json.loads(header.pop("__metadata__")[_META])
    except (OSError, ValueError, KeyError):
        return None
    base = 8 + length
    if any(base + entry["data_offsets"][1] > len(data) for entry in header.values()):
        return None
    groups = {}
    for number, (facts, num_documents, num_bytes) in enumerate(meta["groups"]):
        blobs = []
        for place in range(9):
            begin, end = header[f"{number}.{place}"]["data_offsets"]
            blobs.append(data[base + begin : base + end])
        groups[Group(**facts)] = GroupResult(
            num_documents=num_documents,
            num_text_bytes=num_bytes,
            ids=array("I", blobs[0]),
            id_counts=array("Q", blobs[1]),
            units=blobs[2],
            ends=blobs[3],
            nums=blobs[4],
            firsts=(blobs[5], blobs[6], blobs[7]),
            whole=tuple(json.loads(blobs[8])),
        )
    return _summary(meta["summary"]), groups


def _summary(facts: dict[str, Any]) -> PartSummary:
    defects = {kind: (num, where) for kind, (num, where) in facts["defects"].items()}
    return PartSummary(**{**facts, "digest_sum": int(facts["digest_sum"]), "defects": defects})
