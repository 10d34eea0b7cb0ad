"""Add the parts of a run: units of all groups are encoded once, in bounded memory.

Invariant: sums of integers; the order of parts and where a flush falls change nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specctl.contract.fingerprint import digest_bytes
from specctl.contract.text import printable
from specctl.tokenmap.counting import LoadedTokenizer
from specctl.tokenmap.counts import (
    CountArtefact,
    CountFacts,
    CountTable,
    DomainCounts,
    domain_counts,
)
from specctl.tokenmap.parts import Group, GroupResult, PartSummary
from specctl.tokenmap.structure import FastPlan

if TYPE_CHECKING:
    from specctl.tokenmap.encoding import UnitEncoder

_MAX_ROWS = 3_000_000
_MAX_BYTES = 96 << 20
_MODULUS = 1 << 256


class Totals:
    """The running sum of a run's parts."""

    def __init__(self, tokenizer: LoadedTokenizer, plan: FastPlan | None) -> None:
        """Begin with nothing added."""
        self._tokenizer = tokenizer
        self._encoder: UnitEncoder | None = None
        if plan is not None:
            from specctl.tokenmap.encoding import UnitEncoder

            self._encoder = UnitEncoder.of(plan, tokenizer.handle)
        self._per_id: dict[Group, array[int]] = {}
        self._sizes: dict[Group, tuple[int, int]] = {}
        self._tables: dict[Group, list[Any]] = {}
        self._firsts: dict[Group, list[Any]] = {}
        self._whole: dict[Group, list[str]] = {}
        self._rows = self._bytes = 0
        self.num_documents = self.digest_sum = self.num_units = self.num_unit_occurrences = 0
        self.lowest: int | None = None
        self.highest: int | None = None
        self.defects: dict[str, tuple[int, str]] = {}

    @property
    def num_held_out(self) -> int:
        """Documents on the held-out side."""
        return sum(num for group, (num, _) in self._sizes.items() if group.side == "held_out")

    @property
    def has_both_sides(self) -> bool:
        """Whether both sides have documents."""
        return 0 < self.num_held_out < self.num_documents

    def add(self, summary: PartSummary, groups: Mapping[Group, GroupResult]) -> None:
        """Add one part."""
        self.num_documents += summary.num_documents
        self.digest_sum = (self.digest_sum + summary.digest_sum) % _MODULUS
        bounds = [b for b in (self.lowest, summary.lowest) if b is not None]
        self.lowest = min(bounds, default=None)
        bounds = [b for b in (self.highest, summary.highest) if b is not None]
        self.highest = max(bounds, default=None)
        for kind, (num, where) in summary.defects.items():
            before, first = self.defects.get(kind, (0, printable(where)))
            self.defects[kind] = (before + num, first)
        for group, result in groups.items():
            self._add_group(group, result)
        if self._rows > _MAX_ROWS or self._bytes > _MAX_BYTES:
            self._flush()

    def _add_group(self, group: Group, result: GroupResult) -> None:
        num, size = self._sizes.get(group, (0, 0))
        self._sizes[group] = (num + result.num_documents, size + result.num_text_bytes)
        per_id = self._counts_of(group)
        for target_id, count in zip(result.ids, result.id_counts, strict=True):
            per_id[target_id] += count
        if self._encoder is None:
            return
        from specctl.tokenmap.scan import from_bytes

        if result.whole:
            self._whole.setdefault(group, []).extend(result.whole)
            self._bytes += sum(map(len, result.whole))
        for kept, (units, ends, nums) in (
            (self._tables, (result.units, result.ends, result.nums)),
            (self._firsts, result.firsts),
        ):
            table = from_bytes(units, ends, nums)
            if len(table):
                kept.setdefault(group, []).append(table)
                self._rows += len(table)
                self._bytes += len(units)

    def _counts_of(self, group: Group) -> array[int]:
        if group not in self._per_id:
            self._per_id[group] = array("Q", bytes(8 * self._tokenizer.size))
        return self._per_id[group]

    def finish(self) -> None:
        """Encode what is left; nothing may be added afterwards."""
        self._flush()

    def _flush(self) -> None:
        if self._encoder is None:
            return
        from specctl.tokenmap.scan import lean_memory

        with lean_memory():
            self._encode(self._encoder)
        self._rows = self._bytes = 0

    def _encode(self, encoder: UnitEncoder) -> None:
        """Add the counts of everything that waits, and let go of it."""
        from specctl.tokenmap.encoding import encode_firsts, encode_units, encode_whole
        from specctl.tokenmap.scan import counts_of, merged

        for kept, encode in ((self._tables, encode_units), (self._firsts, encode_firsts)):
            groups = sorted(kept)
            # A group's tables are let go before the next one is merged.
            tables = {place: merged(kept.pop(group)) for place, group in enumerate(groups)}
            counts = {
                place: counts_of(self._counts_of(group)) for place, group in enumerate(groups)
            }
            counted = encode(tables, encoder, counts)
            self.num_units += counted.num_units
            self.num_unit_occurrences += counted.num_occurrences
        for group, texts in self._whole.items():
            ones = [1] * len(texts)
            encode_whole(texts, ones, encoder.first, counts_of(self._counts_of(group)))
        self._whole.clear()

    def table(self, side: str) -> CountTable:
        """Return one side, grouped by domain and by language."""
        groups = sorted(group for group in self._sizes if group.side == side)
        return CountTable(
            domains=self._rows_by(groups, "domain"), languages=self._rows_by(groups, "language")
        )

    def _rows_by(self, groups: list[Group], key: str) -> tuple[DomainCounts, ...]:
        names = sorted({str(getattr(group, key)) for group in groups})
        rows = []
        for name in names:
            inside = [group for group in groups if getattr(group, key) == name]
            per_id = array("Q", bytes(8 * self._tokenizer.size))
            for group in inside:
                for target_id, count in enumerate(self._counts_of(group)):
                    if count:
                        per_id[target_id] += count
            rows.append(
                domain_counts(
                    name,
                    per_id,
                    num_documents=sum(self._sizes[group][0] for group in inside),
                    num_text_bytes=sum(self._sizes[group][1] for group in inside),
                )
            )
        return tuple(rows)


def artefact_of(
    totals: Totals,
    tokenizer: LoadedTokenizer,
    plan: FastPlan | str,
    options: dict[str, str],
    held_out: str,
) -> CountArtefact:
    """Return the artefact of a finished sum."""
    is_fast = isinstance(plan, FastPlan)
    digest = totals.num_documents.to_bytes(8, "big") + totals.digest_sum.to_bytes(32, "big")
    facts = CountFacts(
        tokenizer_digest=tokenizer.digest,
        tokenizer_size=tokenizer.size,
        corpus_digest=digest_bytes(digest),
        method="unique-pre-tokens" if is_fast else "batch",
        method_reason=plan.reason if isinstance(plan, FastPlan) else plan,
        held_out=held_out,
        options=options,
        num_units=totals.num_units,
        num_unit_occurrences=totals.num_unit_occurrences,
    )
    return CountArtefact(
        facts=facts, counted=totals.table("counted"), held_out=totals.table("held_out")
    )
