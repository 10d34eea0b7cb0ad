"""Read the documents of one task and reduce them to distinct units and id counts.

Runs in worker processes. Invariants: the result depends on the task's documents alone; memory is
bounded by `_HELD_BYTES` of text and the distinct units of one task.
"""

from __future__ import annotations

import collections
import hashlib
import os
import re
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.tokenmap.counting import LoadedTokenizer, load_tokenizer
from specctl.tokenmap.parts import Group, GroupResult, PartSummary, part_path, write_part
from specctl.tokenmap.readers import Defect, Piece, Reading, last_cut, next_cut, read_pieces
from specctl.tokenmap.sources import SourceFile, Task
from specctl.tokenmap.split import paragraphs
from specctl.tokenmap.structure import UnitPlan

if TYPE_CHECKING:
    import pyarrow as pa

_HELD_BYTES = 8 << 20
_GROUP_BYTES = 4 << 20
_WHOLE_BYTES = 2 << 20
_LEFT_BYTES = 1 << 16
"""Texts to encode whole that a task leaves to the caller, who has the tokenizer loaded: a worker
that never needs one is smaller by all of it."""
_MODULUS = 1 << 256
NUMBERS = 1 << 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every worker of a run needs.

    Args:
        tokenizer: path of tokenizer.json.
        plan: how units are found; None: every document is encoded whole.
        reading: how documents are read.
        held_below: a document is held out when its number is below this, of 2^64.
        moved_in: number that is held out although the rule says counted.
        moved_out: number that is counted although the rule says held out.
        is_by_paragraph: paragraphs are the documents.
        directory: where parts are written.
    """

    tokenizer: Path
    plan: UnitPlan | None
    reading: Reading
    held_below: int
    moved_in: int | None = None
    moved_out: int | None = None
    is_by_paragraph: bool = False
    directory: Path

    def side(self, number: int, file: SourceFile) -> str:
        """Return the side of a document with this split number."""
        if file.held_out or number == self.moved_in:
            return "held_out"
        is_held = number < self.held_below and number != self.moved_out
        return "held_out" if is_held else "counted"


@dataclass(kw_only=True, slots=True)
class _Held:
    """Texts and results of one group while its task runs."""

    documents: list[bytes] = field(default_factory=list)
    held_bytes: int = 0
    whole: list[str] = field(default_factory=list)
    whole_bytes: int = 0
    ids: collections.Counter[int] = field(default_factory=collections.Counter)
    tables: list[Any] = field(default_factory=list)
    firsts: list[Any] = field(default_factory=list)
    num_documents: int = 0
    num_text_bytes: int = 0


class TaskRun:
    """One task while it is read."""

    def __init__(self, job: Job) -> None:
        """Begin with nothing read."""
        self._job = job
        self._marks = _mark_patterns(() if job.plan is None else job.plan.whole_if)
        self._groups: dict[Group, _Held] = collections.defaultdict(_Held)
        self._held_bytes = 0
        self._digest_sum = 0
        self._numbers: list[int] = []
        self._defects: dict[str, tuple[int, str]] = {}
        self._num_documents = 0

    def read(self, task: Task) -> None:
        """Read every document of a task; one that breaks off ends where it does."""
        for file in task.files:
            digests: list[bytes] = []
            group = Group(side="counted", domain=file.domain, language="")
            for piece in self._pieces(file, task):
                if isinstance(piece, Defect):
                    kind = f"{piece.kind}; the text before it is counted" if digests else piece.kind
                    num, first = self._defects.get(kind, (0, piece.where))
                    self._defects[kind] = (num + 1, first)
                    continue
                digest = hashlib.sha256(piece.data).digest()
                if piece.is_first:
                    number = int.from_bytes(digest[:8], "big")
                    self._numbers = [min([number, *self._numbers]), max([number, *self._numbers])]
                    side = self._job.side(number, file)
                    group = Group(side=side, domain=file.domain, language=piece.language)
                digests.append(digest)
                self._add(self._groups[group], piece)
                if piece.is_last:
                    self._end_document(group, digests)
                    digests = []
            if digests:
                self._end_document(group, digests)

    def _pieces(self, file: SourceFile, task: Task) -> Iterator[Piece | Defect]:
        found = read_pieces(file, task, self._job.reading)
        if not self._job.is_by_paragraph:
            yield from found
            return
        for piece in found:
            if isinstance(piece, Defect):
                yield piece
                continue
            for number, text in enumerate(paragraphs(piece.data.decode("utf-8")), start=1):
                place = f"{piece.where}#paragraph{number}"
                yield Piece(data=text.encode("utf-8"), where=place, language=piece.language)

    def _end_document(self, group: Group, digests: list[bytes]) -> None:
        content = hashlib.sha256(group.domain.encode("utf-8") + b"\0" + b"".join(digests))
        self._digest_sum = (self._digest_sum + int.from_bytes(content.digest(), "big")) % _MODULUS
        self._groups[group].num_documents += 1
        self._num_documents += 1

    def _add(self, held: _Held, piece: Piece) -> None:
        held.num_text_bytes += len(piece.data)
        for data, is_whole in self._parts(piece.data):
            if is_whole:
                self._hold_whole(held, data)
            else:
                self._hold(held, data)

    def _parts(self, data: bytes) -> Iterator[tuple[bytes, bool]]:
        """Yield the parts of a piece and whether they are encoded as they stand."""
        plan = self._job.plan
        if plan is None:
            yield data, True
            return
        spans = [m.span() for marks in self._marks for m in marks.finditer(data)]
        if not spans:
            yield data, False
            return
        if plan.first_differs:  # a part in the middle would be encoded like a beginning
            yield data, True
            return
        end = 0
        for low, high in windows(data, sorted(spans)):
            if low > end:
                yield data[end:low], False
            yield data[low:high], True
            end = high
        if end < len(data):
            yield data[end:], False

    def _hold_whole(self, held: _Held, data: bytes) -> None:
        held.whole.append(data.decode("utf-8"))
        held.whole_bytes += len(data)
        if held.whole_bytes > _WHOLE_BYTES:
            self._encode(held)

    def _hold(self, held: _Held, data: bytes) -> None:
        held.documents.append(data)
        held.held_bytes += len(data)
        self._held_bytes += len(data)
        if held.held_bytes > _GROUP_BYTES:
            self._scan(held)
        elif self._held_bytes > _HELD_BYTES:
            for other in self._groups.values():
                self._scan(other)

    def _scan(self, held: _Held) -> None:
        """Turn held documents into a table of units."""
        if not held.documents or self._job.plan is None:
            return
        from specctl.tokenmap import scan

        rest, firsts = scan.unit_counts(
            held.documents, self._job.plan.rules, apart=self._job.plan.first_differs
        )
        held.tables.append(rest)
        if firsts is not None:
            held.firsts.append(firsts)
        self._held_bytes -= held.held_bytes
        held.documents, held.held_bytes = [], 0

    def _encode(self, held: _Held) -> None:
        if not held.whole:
            return
        handle = _tokenizer(self._job.tokenizer).handle
        encode = getattr(handle, "encode_batch_fast", handle.encode_batch)
        for encoding in encode(held.whole, add_special_tokens=False):
            held.ids.update(encoding.ids)
        held.whole, held.whole_bytes = [], 0

    def write(self, path: Path, num_disk_bytes: int) -> None:
        """Write what was found."""
        groups = {}
        num_left = sum(held.whole_bytes for held in self._groups.values())
        is_left = self._job.plan is not None and num_left <= _LEFT_BYTES
        for group, held in self._groups.items():
            self._scan(held)
            if not is_left:
                self._encode(held)
            ids = array("I", sorted(held.ids))
            units, ends, nums = _columns(held.tables)
            groups[group] = GroupResult(
                num_documents=held.num_documents,
                num_text_bytes=held.num_text_bytes,
                ids=ids,
                id_counts=array("Q", (held.ids[i] for i in ids)),
                units=units,
                ends=ends,
                nums=nums,
                firsts=_columns(held.firsts),
                whole=tuple(held.whole),
            )
        summary = PartSummary(
            num_documents=self._num_documents,
            digest_sum=self._digest_sum,
            lowest=min(self._numbers, default=None),
            highest=max(self._numbers, default=None),
            defects=self._defects,
            num_disk_bytes=num_disk_bytes,
        )
        write_part(path, summary, groups)


def windows(data: bytes, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of a text around some spans, from one `cuts.PIECE_CUT` to another.

    Args:
        data: UTF-8.
        spans: ascending (begin, end) offsets.

    Returns:
        Ascending, disjoint (begin, end) offsets that hold all spans.
    """
    found: list[tuple[int, int]] = []
    for begin, end in spans:
        if found and begin < found[-1][1]:
            low, high = found.pop()
            found.append((low, high if end < high else next_cut(data, end)))
        else:
            found.append((last_cut(data, 0, begin), next_cut(data, end)))
    return found


def _mark_patterns(marks: tuple[str, ...]) -> tuple[re.Pattern[bytes], ...]:
    """Return one pattern for the marks of each first byte, which is what a search skips to."""
    by_first: dict[bytes, list[bytes]] = collections.defaultdict(list)
    for mark in marks:
        data = mark.encode("utf-8")
        by_first[data[:1]].append(re.escape(data[1:]))
    return tuple(
        re.compile(re.escape(first) + b"(?:" + b"|".join(sorted(rests)) + b")")
        for first, rests in sorted(by_first.items())
    )


def _columns(tables: list[pa.Table]) -> tuple[bytes, bytes, bytes]:
    if not tables:
        return b"", b"", b""
    from specctl.tokenmap import scan

    return scan.to_bytes(scan.merged(tables))


@lru_cache(maxsize=1)
def _tokenizer(path: Path) -> LoadedTokenizer:
    """Load the run's tokenizer once in each worker."""
    return load_tokenizer(path)


def run_task(job: Job, task: Task) -> int:
    """Count one task and write its part; returns the task's number."""
    run = TaskRun(job)
    run.read(task)
    run.write(part_path(job.directory, task.number), task.num_bytes)
    return task.number


def start_worker(parent: int) -> None:
    """Prepare a worker process: one thread of each library, and end when the parent is gone."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # pyarrow's own allocators keep a third more than a task needs.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
