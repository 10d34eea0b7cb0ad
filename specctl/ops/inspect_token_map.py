"""Say what a token map file holds, in the report that checkpoints have: vocabulary and findings."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from specctl.contract.text import printable
from specctl.contract.vocabulary_map import map_digest
from specctl.ops.load import Loaded
from specctl.ops.report import (
    InspectReport,
    Roles,
    SharingFacts,
    Source,
    Tensors,
    VocabularyFacts,
    finding,
)
from specctl.ops.severity import SeverityRules
from specctl.ops.token_map_check import TokenMapFile, check_token_map

FORMAT = "token-map"
_FORMS = {
    ".json": "JSON list of target ids",
    ".pt": "pickled list of target ids",
    ".pth": "pickled list of target ids",
    ".safetensors": "`d2t` offsets and `t2d` mask",
}


def inspect_map(
    source: str, target: Loaded | None, target_source: Source | None, rules: SeverityRules
) -> tuple[InspectReport, tuple[int, ...] | None]:
    """Return the report and the absolute target ids in draft-id order, None when unreadable.

    Args:
        source: the file.
        target: that the map is for.
        target_source: what the report says of it.
        rules: severities of this run.
    """
    facts = None if target is None else target.target
    found = check_token_map(source, facts)
    report = InspectReport(
        format=FORMAT,
        roles=Roles(source=_source(source, found), target=target_source),
        geometry=None,
        vocabulary=_vocabulary(found, target),
        aux_hidden=None,
        sharing=SharingFacts(embedding=None, head=None, head_decided_by=None, decoys=()),
        details=_details(found),
        bundled=None,
        engines=(),
        tensors=Tensors(
            num_tensors=0, num_bytes=Path(source).stat().st_size, num_files=1, parts=(), list=()
        ),
        diagnostics=tuple(finding(item) for item in rules.apply(found.diagnostics)),
    )
    return report, found.ids_target


def _source(source: str, found: TokenMapFile) -> Source:
    evidence = [_FORMS[Path(source).suffix]]
    if found.provenance is not None:
        evidence.append(f"`{found.provenance.file}`")
    return Source(
        path=printable(source),
        revision=None,
        role=None,
        format=FORMAT,
        architecture=None,
        algorithm=None,
        target_name=None,
        evidence=tuple(evidence),
    )


def _vocabulary(found: TokenMapFile, target: Loaded | None) -> VocabularyFacts:
    known = None if target is None else target.target
    told = found.provenance
    ids = found.ids_target
    rows = None if known is None else known.vocab_size
    size = None if known is None else known.tokenizer_size
    return VocabularyFacts(
        target_vocab_size=rows or (None if told is None else told.target_vocab_size),
        draft_vocab_size=None if ids is None else len(ids),
        map_kind=None if ids is None else "reduced",
        map_tensor=None,
        mask_tensor=None,
        map_digest=None if ids is None else map_digest(ids),
        decided_by=None if ids is None else "the entries are absolute target ids",
        tokenizer_size=size or (None if told is None else told.tokenizer_size),
        eos_token_ids=() if known is None else known.eos_token_ids,
    )


def _details(found: TokenMapFile) -> dict[str, str | int | bool]:
    """Return the order of the entries and what is stored about the origin."""
    ids, told = found.ids_target, found.provenance
    details: dict[str, str | int | bool] = {}
    if ids is not None:
        details["is_ascending"] = all(a < b for a, b in pairwise(ids))
        details["map_digest"] = map_digest(ids)
    if told is not None:
        stated = {"tokenizer_digest": told.tokenizer_digest, "corpus_digest": told.corpus_digest}
        details |= {name: value for name, value in stated.items() if value is not None}
    return details
