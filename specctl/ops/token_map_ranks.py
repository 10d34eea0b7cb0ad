"""Take a list of ids in order of frequency for counts: FR-Spec's files are cut like a count file.

Rule: rank r of N stands for N - r occurrences, so ranks are kept and nothing can be measured on
them. What such lists are known to have wrong is repaired and reported: repeated ids (the first one
counts) and ids that the tokenizer does not have.
*Source:* FR-Spec `freq_32768.pt`, whose last entries are replaced with end ids, some of them twice.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path

import msgspec

from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.vocabulary_map import map_digest
from specctl.tokenmap.counting import LoadedTokenizer
from specctl.tokenmap.counts import (
    CountArtefact,
    CountFacts,
    CountTable,
    domain_counts,
    read_counts,
)
from specctl.tokenmap.files import check_ids, read_entries

RANKS = "ranks of a list"
_LISTS = (".json", ".pt", ".pth")


@dataclass(frozen=True, kw_only=True, slots=True)
class CountSource:
    """Counts to cut from.

    Args:
        num_listed: distinct ids of a ranked list, None for a count file.
        found: what was repaired.
    """

    artefact: CountArtefact
    num_listed: int | None
    found: tuple[Diagnostic, ...]


def read_count_source(path: Path, tokenizer: LoadedTokenizer) -> CountSource:
    """Return the counts of a count file, or those that a ranked list stands for.

    Raises:
        DiagnosticError: SD432, SD420, SD402 for a list without one id of the tokenizer, and family
            1 codes for a file that cannot be read.
    """
    if path.suffix not in _LISTS:
        return CountSource(artefact=read_counts(path), num_listed=None, found=())
    entries = read_entries(path)
    found = tuple(
        msgspec.structs.replace(item, severity="warning", help="It was left out of the new map")
        for item in check_ids(entries, where=str(path), target_vocab_size=tokenizer.size)
    )
    ids = [i for i in dict.fromkeys(entries) if 0 <= i < tokenizer.size]
    if not ids:
        raise DiagnosticError(
            diagnose(
                "SD402",
                where=str(path),
                message=f"none of {len(entries)} entries is an id of the tokenizer",
                expected=f"0 to {tokenizer.size - 1}",
                found="no such id",
            )
        )
    per_id = array("Q", bytes(8 * tokenizer.size))
    for rank, target_id in enumerate(ids):
        per_id[target_id] = len(ids) - rank
    row = domain_counts(path.name, per_id, num_documents=0, num_text_bytes=0)
    artefact = CountArtefact(
        facts=CountFacts(
            tokenizer_digest=tokenizer.digest,
            tokenizer_size=tokenizer.size,
            corpus_digest=map_digest(entries),
            method="token-ids",
            method_reason=RANKS,
            held_out="nothing",
        ),
        counted=CountTable(domains=(row,)),
        held_out=CountTable(domains=()),
    )
    return CountSource(artefact=artefact, num_listed=len(ids), found=found)
