"""Count corpora that are token ids already: `.npy`, and raw `.bin` of a named type.

Loaded on demand: imports numpy at its top. Files are mapped, not read; memory is bounded by one
block. Invariants: every id is checked against the tokenizer; sums do not depend on block sizes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.tokenmap.counting import LoadedTokenizer
from specctl.tokenmap.counts import (
    CountArtefact,
    CountFacts,
    CountTable,
    DomainCounts,
    domain_counts,
)
from specctl.tokenmap.listing import unreadable
from specctl.tokenmap.sources import SourceFile

BLOCK_IDS = 1 << 20
IdType = Literal["u16", "u32", "i64"]
_HASHED_IDS = 512
_DTYPES = {"u16": "<u2", "u32": "<u4", "i64": "<i8"}


def artefact_of_ids(
    files: Sequence[SourceFile],
    tokenizer: LoadedTokenizer,
    *,
    id_type: IdType | None,
    held_below: int,
    held_out: str,
    progress: Callable[[Literal["reading", "encoding"], int, int], None] | None = None,
) -> CountArtefact:
    """Return the counts of token-id files as an artefact; arguments as in `count_ids`.

    The corpus digest covers the counts, not the order of ids: hashing the files would take longer
    than counting them.
    """
    total, done = sum(file.num_bytes for file in files), 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress("reading", done, total)

    found = count_ids(
        files, size=tokenizer.size, id_type=id_type, held_below=held_below, advance=advance
    )
    hashed = hashlib.sha256()
    tables: dict[str, list[DomainCounts]] = {"counted": [], "held_out": []}
    for side, domain in sorted(found):
        counts, num_blocks, num_bytes = found[side, domain]
        hashed.update(f"{side} {domain} {num_blocks}\n".encode())
        hashed.update(counts.tobytes())
        row = domain_counts(
            domain,
            array("Q", counts.tobytes()),
            num_documents=num_blocks,
            num_text_bytes=num_bytes,
        )
        tables[side].append(row)
    facts = CountFacts(
        tokenizer_digest=tokenizer.digest,
        tokenizer_size=tokenizer.size,
        corpus_digest=f"sha256:{hashed.hexdigest()}",
        method="token-ids",
        method_reason="the corpus is token ids",
        held_out=held_out,
    )
    counted, held = (CountTable(domains=tuple(tables[side])) for side in ("counted", "held_out"))
    return CountArtefact(facts=facts, counted=counted, held_out=held)


def count_ids(
    files: Sequence[SourceFile],
    *,
    size: int,
    id_type: IdType | None,
    held_below: int,
    advance: Callable[[int], None] | None = None,
) -> dict[tuple[str, str], tuple[np.ndarray, int, int]]:
    """Return (side, domain) -> ([size] uint64 occurrences, blocks, bytes of ids).

    A block of `BLOCK_IDS` ids is a document; its first 512 ids decide its side.

    Args:
        files: `.npy` or `.bin`.
        size: ids of the tokenizer; every id must be below it.
        id_type: element type of `.bin` files.
        held_below: a block is held out when its number is below this, of 2^64.
        advance: called with the bytes of each block.

    Raises:
        DiagnosticError: SD423 for a file that is no list of ids of this tokenizer.
    """
    found: dict[tuple[str, str], tuple[np.ndarray, int, int]] = {}
    for file in files:
        for block in _blocks(file.path, id_type):
            number = int.from_bytes(
                hashlib.sha256(block[:_HASHED_IDS].tobytes()).digest()[:8], "big"
            )
            side = "held_out" if file.held_out or number < held_below else "counted"
            key = (side, file.domain)
            if key not in found:
                found[key] = (np.zeros(size, np.uint64), 0, 0)
            counts, num_blocks, num_bytes = found[key]
            counts += _counted(block, size, file.path)
            found[key] = (counts, num_blocks + 1, num_bytes + block.nbytes)
            if advance is not None:
                advance(block.nbytes)
    return found


def _counted(block: np.ndarray, size: int, where: str) -> np.ndarray:
    if block.dtype.kind == "i" and len(block) and block.min() < 0:
        raise _refused(where, "an id is negative", found=int(block.min()), expected="0 or more")
    # Before counting: a table as long as a wrong id is large may not fit into memory.
    if len(block) and block.max() >= size:
        raise _refused(
            where,
            "an id is not one of the tokenizer's",
            expected=f"below {size}",
            found=int(block.max()),
        )
    if block.dtype.itemsize == 8:
        block = block.astype(np.int64, copy=False)  # numpy counts no unsigned ones of this width
    return np.bincount(block, minlength=size).astype(np.uint64)


def _blocks(path: str, id_type: IdType | None) -> Iterator[np.ndarray]:
    ids: np.ndarray = _mapped(path, id_type)
    for begin in range(0, len(ids), BLOCK_IDS):
        yield ids[begin : begin + BLOCK_IDS]


def _mapped(path: str, id_type: IdType | None) -> np.ndarray:
    if Path(path).suffix.lower() == ".npy":
        try:
            ids = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise unreadable(path, error) from error
            raise _refused(path, f"numpy refuses it: {error}") from error
        if ids.dtype.kind not in "iu" or ids.dtype.itemsize > 8:
            raise _refused(path, "the array does not hold integers", found=str(ids.dtype))
        return np.asarray(ids).reshape(-1)
    if id_type is None:
        raise _refused(
            path,
            "a `.bin` file does not say how wide its ids are",
            expected="`--id-type u16`, `u32` or `i64`",
        )
    dtype = np.dtype(_DTYPES[id_type])
    try:
        num_bytes = Path(path).stat().st_size
        raw = np.memmap(path, np.uint8, mode="r") if num_bytes else np.empty(0, np.uint8)
    except OSError as error:
        raise unreadable(path, error) from error
    if num_bytes % dtype.itemsize:
        raise _refused(
            path,
            "the size is no multiple of an id's",
            expected=f"a multiple of {dtype.itemsize} bytes",
            found=num_bytes,
        )
    return raw.view(dtype)


def _refused(where: str, message: str, **details: object) -> DiagnosticError:
    return DiagnosticError(
        diagnose(
            "SD423",
            where=where,
            message=message,
            expected=details.get("expected"),
            found=details.get("found"),
        )
    )
