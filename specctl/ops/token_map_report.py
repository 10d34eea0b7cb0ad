"""The report of a built token map, its warnings and the provenance that is stored beside the files.

Invariants: a value, nothing is printed; the provenance holds neither times nor paths, so that equal
inputs give equal bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from specctl import __version__
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.vocabulary_map import map_digest
from specctl.tokenmap.counting import Counts, LoadedTokenizer
from specctl.tokenmap.coverage import ASSUMPTION, SIZE_STEP, CoveragePoint
from specctl.tokenmap.documents import Corpus
from specctl.tokenmap.forced import ForcedId, TargetIds
from specctl.tokenmap.selection import Selection
from specctl.tokenmap.split import HELD_OUT_EVERY, Survey

_ENOUGH_SEEN = 0.99


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMapFacts:
    """What a map holds, what it was counted from, and how good it is on held-out text.

    Args:
        tokenizer: path of tokenizer.json.
        size_origin: `given`, or `derived` by `size_rule`.
        size_rule: the rule and its assumption in words.
        recommended_size: what the rule chooses, whatever was given.
        coverage: share of held-out token occurrences inside the map.
        coverage_of_seen: the same for all ids seen in the counted text: the best a larger map
            reaches before it takes unseen ids.
        displaced: ids that frequency alone would have chosen instead of forced ones.
        num_unseen: ids of the map that never occur in the counted text and are not forced.
        num_reserved: special tokens left out because their name says reserved.
        map_digest: `sha256:` over the absolute ids, as the manifest records it.
    """

    tokenizer: str
    tokenizer_size: int
    tokenizer_digest: str
    target_vocab_size: int
    num_files: int
    num_documents: int
    num_tokens: int
    num_held_out_documents: int
    num_held_out_tokens: int
    corpus_digest: str
    size: int
    size_origin: Literal["given", "derived"]
    size_rule: str
    recommended_size: int
    coverage: float
    coverage_of_seen: float
    curve: tuple[CoveragePoint, ...]
    forced: tuple[ForcedId, ...]
    displaced: tuple[int, ...]
    num_unseen: int
    num_reserved: int
    map_digest: str
    diagnostics: tuple[Diagnostic, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMapReport(TokenMapFacts):
    """The answer of `specctl build-token-map`: the facts, and the files that were written.

    Args:
        files: file name -> `sha256:` of its bytes.
    """

    directory: str
    files: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class MapChoice:
    """The chosen ids and how the sizes compare; see `TokenMapFacts`."""

    selection: Selection
    size_origin: Literal["given", "derived"]
    recommended: int
    coverage: float
    coverage_of_seen: float
    curve: tuple[CoveragePoint, ...]


def map_facts(
    texts: Corpus,
    loaded: LoadedTokenizer,
    target: TargetIds,
    plan: Survey,
    counts: tuple[Counts, Counts],
    choice: MapChoice,
    max_loss: float,
    target_vocab_size: int,
) -> TokenMapFacts:
    """Return the facts of a chosen map; nothing is written yet."""
    counted, held_out = counts
    ids_target = choice.selection.ids_target
    return TokenMapFacts(
        tokenizer=str(loaded.path),
        tokenizer_size=loaded.size,
        tokenizer_digest=loaded.digest,
        target_vocab_size=target_vocab_size,
        num_files=len(texts.files),
        num_documents=plan.num_documents,
        num_tokens=counted.num_tokens,
        num_held_out_documents=held_out.num_documents if plan.has_held_out else 0,
        num_held_out_tokens=held_out.num_tokens if plan.has_held_out else 0,
        corpus_digest=plan.corpus_digest,
        size=len(ids_target),
        size_origin=choice.size_origin,
        size_rule=f"smallest multiple of {SIZE_STEP} whose held-out coverage is within "
        f"{max_loss:g} of that of all ids seen; assumes that {ASSUMPTION}",
        recommended_size=choice.recommended,
        coverage=choice.coverage,
        coverage_of_seen=choice.coverage_of_seen,
        curve=choice.curve,
        forced=target.forced,
        displaced=choice.selection.displaced,
        num_unseen=choice.selection.num_unseen,
        num_reserved=target.num_reserved,
        map_digest=map_digest(ids_target),
        diagnostics=tuple(_warnings(texts, plan, choice)),
    )


def written_report(
    facts: TokenMapFacts, *, directory: str, files: dict[str, str]
) -> TokenMapReport:
    """Return the facts with the files that hold the map."""
    known: dict[str, Any] = {field.name: getattr(facts, field.name) for field in fields(facts)}
    return TokenMapReport(**known, directory=directory, files=files)


def _warnings(texts: Corpus, plan: Survey, choice: MapChoice) -> list[Diagnostic]:
    where = str(texts.files[0])
    findings: list[Diagnostic] = []
    if not plan.has_held_out:
        findings.append(
            diagnose(
                "SD427",
                where=where,
                message=f"{plan.num_documents} documents hold one text; nothing could be held out",
                expected="two different texts or more",
                found="one",
            )
        )
    if plan.first_replaced is not None:
        findings.append(
            diagnose(
                "SD430",
                where=plan.first_replaced,
                message=f"{plan.num_replaced} documents held half surrogate pairs, first here",
                expected="characters",
                found="half surrogate pairs, counted as U+FFFD",
            )
        )
    size = len(choice.selection.ids_target)
    if choice.selection.num_unseen:
        findings.append(
            diagnose(
                "SD428",
                where=f"--size {size}",
                message=f"{choice.selection.num_unseen} of {size} ids never occur in the counted "
                "text",
                expected=f"at most {size - choice.selection.num_unseen} ids for this corpus",
                found=f"{size} ids",
            )
        )
    if plan.has_held_out and choice.coverage_of_seen < _ENOUGH_SEEN:
        findings.append(
            diagnose(
                "SD431",
                where=where,
                message=f"{1 - choice.coverage_of_seen:.2%} of held-out tokens are ids that the "
                "counted text never shows",
                expected=f"at most {1 - _ENOUGH_SEEN:.0%}",
                found=f"{1 - choice.coverage_of_seen:.2%}",
            )
        )
    if size % 2:
        findings.append(
            diagnose(
                "SD407",
                where=f"--size {size}",
                message=f"a head of {size} rows cannot be shared by an even number of ranks",
                expected="a multiple of 64",
                found=size,
            )
        )
    return findings


def provenance(facts: TokenMapFacts) -> dict[str, Any]:
    """Return what the map was made from, without times and paths: it must be reproducible."""
    return {
        "schema": "specctl.token-map/1",
        "specctl_version": __version__,
        "size": facts.size,
        "size_origin": facts.size_origin,
        "size_rule": facts.size_rule,
        "target_vocab_size": facts.target_vocab_size,
        "map_digest": facts.map_digest,
        "tokenizer_digest": facts.tokenizer_digest,
        "tokenizer_size": facts.tokenizer_size,
        "corpus_digest": facts.corpus_digest,
        "num_documents": facts.num_documents,
        "num_counted_tokens": facts.num_tokens,
        "num_held_out_documents": facts.num_held_out_documents,
        "num_held_out_tokens": facts.num_held_out_tokens,
        "held_out_every": HELD_OUT_EVERY,
        "coverage": facts.coverage,
        "coverage_of_seen": facts.coverage_of_seen,
        "forced": [
            {"id": forced.target_id, "token": forced.token, "reasons": list(forced.reasons)}
            for forced in facts.forced
        ],
        "displaced": list(facts.displaced),
        "num_unseen": facts.num_unseen,
    }
