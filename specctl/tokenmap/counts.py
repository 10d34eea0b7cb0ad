"""The count artefact: how often each target id occurs, per domain and language, on both sides.

One file holds everything a token map of any size is cut from. Invariants: the same counts give the
same bytes; the file appears whole or not at all; ids are stored sparse (an id that never occurs
takes no space); what is read back was checked against its digest, its sums and its layout version.
*Layout*: a safetensors container. `__metadata__["specctl.counts"]` is JSON (version, facts, tables,
digest); `<side>.<kind>.<i>.ids` U32 ascending and `<side>.<kind>.<i>.counts` U64 hold one row.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from specctl.checkpoint import write_safetensors
from specctl.checkpoint.safetensors_header import read_header
from specctl.checkpoint.sources import LocalStore
from specctl.checkpoint.tensor_entry import TensorEntry
from specctl.contract.diagnostics import DiagnosticError, diagnose, has_errors
from specctl.contract.findings import Findings

COUNTS_VERSION = 1
METADATA_KEY = "specctl.counts"
MAX_TOKENIZER_SIZE = 1 << 24
Method = Literal["unique-pre-tokens", "batch", "token-ids"]
Side = Literal["counted", "held_out"]
SIDES: tuple[Side, ...] = ("counted", "held_out")
_KINDS = ("domains", "languages")


@dataclass(frozen=True, kw_only=True, slots=True)
class DomainCounts:
    """Occurrences of every target id in the documents of one domain (or language).

    Args:
        name: of the domain or language.
        per_id: `array("Q")`, [tokenizer_size] occurrences, index = target id. Read-only.
        num_documents: documents counted.
        num_text_bytes: UTF-8 bytes of their texts; for token-id input the bytes of the ids.
        num_tokens: sum of `per_id`.
    """

    name: str
    per_id: array[int]
    num_documents: int
    num_text_bytes: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CountTable:
    """One side of the split: the same documents grouped by domain, and again by language.

    Args:
        domains: sorted by name; every document is in exactly one.
        languages: sorted by name; every document is in exactly one. Empty for token-id input.
    """

    domains: tuple[DomainCounts, ...]
    languages: tuple[DomainCounts, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of all domains."""
        return sum(domain.num_tokens for domain in self.domains)

    @property
    def num_documents(self) -> int:
        """Documents of all domains."""
        return sum(domain.num_documents for domain in self.domains)

    @property
    def num_text_bytes(self) -> int:
        """Text bytes of all domains."""
        return sum(domain.num_text_bytes for domain in self.domains)


class CountFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the counts were made from and how; two artefacts with equal facts hold equal counts.

    Args:
        tokenizer_digest: `sha256:` of the tokenizer.json.
        tokenizer_size: highest id + 1, added tokens included; length of every `per_id`.
        corpus_digest: `sha256:` over the multiset of (domain, text) of both sides.
        method: how tokens were counted; never a reason for different counts.
        method_reason: why, in words for the report.
        held_out: the split rule in words, such as `fraction 0.1` or `path NAME`.
        options: name -> value of every option that changes counts (fields, roles, cuts ...).
        num_units: units that were encoded one by one; 0 where every text was encoded whole.
        num_unit_occurrences: occurrences of those units in the texts.
    """

    tokenizer_digest: str
    tokenizer_size: int
    corpus_digest: str
    method: Method
    method_reason: str
    held_out: str
    options: dict[str, str] = {}
    num_units: int = 0
    num_unit_occurrences: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CountArtefact:
    """Everything in one count file.

    Args:
        facts: what was counted and how.
        counted: documents that choose the map.
        held_out: documents that measure coverage; no domains when nothing was held out.
    """

    facts: CountFacts
    counted: CountTable
    held_out: CountTable

    def table(self, side: Side) -> CountTable:
        """Return one side."""
        return self.counted if side == "counted" else self.held_out


class _Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    num_documents: int
    num_text_bytes: int
    num_tokens: int


class _Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    facts: CountFacts
    rows: dict[str, list[_Row]]
    digest: str


def domain_counts(
    name: str, per_id: array[int], *, num_documents: int, num_text_bytes: int
) -> DomainCounts:
    """Return one row; its `num_tokens` is the sum of `per_id`."""
    return DomainCounts(
        name=name,
        per_id=per_id,
        num_documents=num_documents,
        num_text_bytes=num_text_bytes,
        num_tokens=sum(per_id),
    )


def summed(rows: Iterable[DomainCounts], tokenizer_size: int) -> array[int]:
    """Return the sum of some rows, [tokenizer_size]."""
    total = array("Q", bytes(8 * tokenizer_size))
    for row in rows:
        for target_id, count in enumerate(row.per_id):
            if count:
                total[target_id] += count
    return total


def write_counts(path: Path | str, artefact: CountArtefact) -> None:
    """Write an artefact atomically; equal artefacts give equal bytes.

    Raises:
        OSError: the directory is missing or not writable.
    """
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    rows: dict[str, list[_Row]] = {}
    for place, domains in _groups(artefact):
        rows[place] = []
        for number, domain in enumerate(domains):
            ids = array("I", (i for i, count in enumerate(domain.per_id) if count))
            counts = array("Q", (domain.per_id[i] for i in ids))
            tensors[f"{place}.{number}.ids"] = ("U32", (len(ids),), _little(ids))
            tensors[f"{place}.{number}.counts"] = ("U64", (len(ids),), _little(counts))
            rows[place].append(
                _Row(
                    name=domain.name,
                    num_documents=domain.num_documents,
                    num_text_bytes=domain.num_text_bytes,
                    num_tokens=domain.num_tokens,
                )
            )
    header = _Header(version=COUNTS_VERSION, facts=artefact.facts, rows=rows, digest="")
    header = msgspec.structs.replace(
        header, digest=_digest(header, ((key, tensors[key][2]) for key in sorted(tensors)))
    )
    write_safetensors(path, tensors, {METADATA_KEY: _text(header)})


def read_counts(path: Path | str) -> CountArtefact:
    """Return the artefact in a count file.

    Raises:
        DiagnosticError: SD432 for a file that is damaged, of a later layout or no count file;
            family 1 codes when it cannot be read or is no safetensors file.
    """
    path = Path(path)
    findings = Findings()
    entries, record = read_header(LocalStore(path.parent), path.name, findings)
    found = findings.result()
    if record is None or has_errors(found):
        raise DiagnosticError(found)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _damaged(path, f"cannot be read: {error.strerror}") from error
    header = _decoded(path, data)
    by_key = {entry.key: data[entry.begin : entry.end] for entry in entries}
    expected = _digest(header, ((key, by_key[key]) for key in sorted(by_key)))
    if expected != header.digest:
        raise _damaged(
            path, "the digest does not fit the content", expected=expected, found=header.digest
        )
    kinds = {entry.key: entry for entry in entries}
    tables: dict[str, tuple[DomainCounts, ...]] = {}
    for place in _places():
        tables[place] = tuple(
            _domain(path, f"{place}.{number}", row, kinds, data, header.facts.tokenizer_size)
            for number, row in enumerate(header.rows.get(place, []))
        )
    num_rows = sum(len(rows) for rows in header.rows.values())
    if set(header.rows) - set(tables) or len(entries) != 2 * num_rows:
        raise _damaged(path, "tensors and table rows do not fit each other")
    counted, held_out = (
        CountTable(domains=tables[f"{side}.domains"], languages=tables[f"{side}.languages"])
        for side in SIDES
    )
    return CountArtefact(facts=header.facts, counted=counted, held_out=held_out)


def _places() -> Iterator[str]:
    return (f"{side}.{kind}" for side in SIDES for kind in _KINDS)


def _groups(artefact: CountArtefact) -> Iterator[tuple[str, tuple[DomainCounts, ...]]]:
    for side in SIDES:
        table = artefact.table(side)
        yield f"{side}.domains", tuple(sorted(table.domains, key=lambda row: row.name))
        yield f"{side}.languages", tuple(sorted(table.languages, key=lambda row: row.name))


def _little(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _text(header: _Header) -> str:
    return msgspec.json.encode(header, order="sorted").decode("utf-8")


def _digest(header: _Header, parts: Iterable[tuple[str, bytes]]) -> str:
    """Return the digest of a header, its own digest left out, and of its tensors in name order."""
    hashed = hashlib.sha256(_text(msgspec.structs.replace(header, digest="")).encode("utf-8"))
    for key, content in parts:
        hashed.update(f"\n{key} {len(content)}\n".encode())
        hashed.update(content)
    return f"sha256:{hashed.hexdigest()}"


def _damaged(path: Path, message: str, **details: Any) -> DiagnosticError:
    return DiagnosticError(diagnose("SD432", where=path.name, message=message, **details))


def _decoded(path: Path, data: bytes) -> _Header:
    """Return the JSON part of a container whose header was proved sound."""
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length]).get("__metadata__") or {}
    text = metadata.get(METADATA_KEY)
    if text is None:
        raise _damaged(
            path,
            "a safetensors file without counts",
            expected=f"`__metadata__` with `{METADATA_KEY}`",
            found=", ".join(f"`{key}`" for key in sorted(metadata)[:8]) or "no metadata",
        )
    try:
        version = msgspec.json.decode(text, type=dict[str, Any]).get("version")
        if version != COUNTS_VERSION:
            raise _damaged(
                path, "another layout version", expected=COUNTS_VERSION, found=repr(version)
            )
        header = msgspec.json.decode(text, type=_Header)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _damaged(path, f"its description cannot be read: {error}") from error
    if not 0 < header.facts.tokenizer_size <= MAX_TOKENIZER_SIZE:
        raise _damaged(
            path, "the tokenizer's size is impossible", found=header.facts.tokenizer_size
        )
    return header


def _domain(
    path: Path,
    place: str,
    row: _Row,
    entries: dict[str, TensorEntry],
    data: bytes,
    tokenizer_size: int,
) -> DomainCounts:
    ids = _values(path, f"{place}.ids", "U32", "I", entries, data)
    counts = _values(path, f"{place}.counts", "U64", "Q", entries, data)
    if len(ids) != len(counts):
        raise _damaged(path, f"`{place}` has {len(ids)} ids and {len(counts)} counts")
    per_id = array("Q", bytes(8 * tokenizer_size))
    last = -1
    for target_id, count in zip(ids, counts, strict=True):
        if not last < target_id < tokenizer_size or count == 0:
            raise _damaged(
                path,
                f"`{place}` has id {target_id} after {last} with count {count}",
                expected=f"ascending ids below {tokenizer_size}, counts above 0",
            )
        per_id[target_id] = count
        last = target_id
    total = sum(counts)
    if total != row.num_tokens or min(row.num_documents, row.num_text_bytes) < 0:
        raise _damaged(
            path, f"the sums of `{place}` do not fit", expected=row.num_tokens, found=total
        )
    return DomainCounts(
        name=row.name,
        per_id=per_id,
        num_documents=row.num_documents,
        num_text_bytes=row.num_text_bytes,
        num_tokens=total,
    )


def _values(
    path: Path, key: str, dtype: str, code: str, entries: dict[str, TensorEntry], data: bytes
) -> array[int]:
    entry = entries.get(key)
    if entry is None or entry.dtype != dtype or len(entry.shape) != 1:
        raise _damaged(path, f"`{key}` is missing or has another type", expected=f"{dtype} [n]")
    values = array(code, data[entry.begin : entry.end])
    if sys.byteorder == "big":
        values.byteswap()
    return values
