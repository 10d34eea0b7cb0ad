"""The report of token maps that were cut from counts, its warnings, and the provenance of a map.

Invariants: values, nothing is printed; the provenance holds neither times nor paths, so that equal
inputs give equal bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specctl import __version__
from specctl.contract.diagnostics import Diagnostic
from specctl.tokenmap.cost import CostFacts, SizeEstimate
from specctl.tokenmap.counts import CountArtefact
from specctl.tokenmap.coverage import SliceCoverage
from specctl.tokenmap.forced import ForcedId

PROVENANCE_SCHEMA = "specctl.token-map/2"


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusFacts:
    """What the counts describe.

    Args:
        held_out: the split rule in words.
        method: how tokens were counted, and why so in `method_reason`.
        num_units: distinct pieces that were encoded once each; 0 where texts were encoded whole.
        num_unit_occurrences: how often those pieces occur in the texts.
        weights: domain -> weight, those that are not 1.
    """

    corpus_digest: str
    num_documents: int
    num_text_bytes: int
    num_tokens: int
    num_held_out_documents: int
    num_held_out_tokens: int
    held_out: str
    domains: tuple[str, ...]
    languages: tuple[str, ...]
    method: str
    method_reason: str
    num_units: int
    num_unit_occurrences: int
    weights: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltMap:
    """One map and its files.

    Args:
        size_origin: `given`, or `derived` by the recommendation.
        coverage: share of the measured tokens inside the map.
        displaced: ids that frequency alone would have chosen instead of forced ones.
        num_unseen: ids that never occur in the counted text and are not forced.
        map_digest: `sha256:` over the absolute ids, as the manifest records it.
        directory: of the files.
        files: file name -> `sha256:` of its bytes.
    """

    size: int
    size_origin: Literal["given", "derived"]
    coverage: float
    estimate: SizeEstimate
    displaced: tuple[int, ...]
    num_unseen: int
    map_digest: str
    directory: str
    files: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """Which size is worth most.

    Args:
        rule: `cost model`, or `max loss` when the user gave one.
        text: the rule in words.
        near_low: smallest size that is nearly as fast, by the cost model.
        near_high: largest such size.
    """

    size: int
    rule: Literal["cost model", "max loss"]
    text: str
    near_low: int
    near_high: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMapReport:
    """The answer of `build-token-map` and `cut-token-map`.

    Args:
        tokenizer: path of tokenizer.json.
        measured_on: what the coverage of the curve and of the maps was measured on.
        coverage_of_seen: the same share for all ids seen in the counted text: the best a larger map
            reaches before it takes unseen ids.
        num_seen: those ids, forced ones included.
        curve: estimate at every size of the curve.
        slices: coverage at the same sizes, the whole held-out text first.
        num_reserved: special tokens left out because their name says reserved.
    """

    tokenizer: str
    tokenizer_size: int
    tokenizer_digest: str
    target_vocab_size: int
    corpus: CorpusFacts
    measured_on: str
    maps: tuple[BuiltMap, ...]
    recommended: Recommendation
    cost_model: str
    cost: CostFacts
    coverage_of_seen: float
    num_seen: int
    curve: tuple[SizeEstimate, ...]
    slices: tuple[SliceCoverage, ...]
    forced: tuple[ForcedId, ...]
    num_reserved: int
    diagnostics: tuple[Diagnostic, ...]


def corpus_facts(artefact: CountArtefact, weights: Mapping[str, str]) -> CorpusFacts:
    """Return what the counts describe."""
    counted, held_out = artefact.counted, artefact.held_out
    return CorpusFacts(
        corpus_digest=artefact.facts.corpus_digest,
        num_documents=counted.num_documents,
        num_text_bytes=counted.num_text_bytes,
        num_tokens=counted.num_tokens,
        num_held_out_documents=held_out.num_documents,
        num_held_out_tokens=held_out.num_tokens,
        held_out=artefact.facts.held_out,
        domains=tuple(row.name for row in counted.domains),
        languages=tuple(row.name for row in counted.languages),
        method=artefact.facts.method,
        method_reason=artefact.facts.method_reason,
        num_units=artefact.facts.num_units,
        num_unit_occurrences=artefact.facts.num_unit_occurrences,
        weights=dict(weights),
    )


def provenance(
    corpus: CorpusFacts,
    forced: tuple[ForcedId, ...],
    *,
    size: int,
    size_origin: str,
    map_digest: str,
    coverage: float,
    measured_on: str,
    target_vocab_size: int,
    tokenizer_size: int,
    tokenizer_digest: str,
    options: Mapping[str, str],
    displaced: tuple[int, ...],
    num_unseen: int,
) -> dict[str, Any]:
    """Return what a map was made from, without times and paths: it must be reproducible.

    Args:
        corpus: of the counts.
        forced: ids that are in whatever their frequency.
        size: this and the next ten: of the map.
        size_origin: the same.
        map_digest: the same.
        coverage: the same.
        measured_on: the same.
        target_vocab_size: the same.
        tokenizer_size: the same.
        tokenizer_digest: the same.
        options: of the counting, those that change counts.
        displaced: the same.
        num_unseen: the same.
    """
    return {
        "schema": PROVENANCE_SCHEMA,
        "specctl_version": __version__,
        "size": size,
        "size_origin": size_origin,
        "target_vocab_size": target_vocab_size,
        "map_digest": map_digest,
        "tokenizer_digest": tokenizer_digest,
        "tokenizer_size": tokenizer_size,
        "corpus_digest": corpus.corpus_digest,
        "num_documents": corpus.num_documents,
        "num_counted_tokens": corpus.num_tokens,
        "num_held_out_documents": corpus.num_held_out_documents,
        "num_held_out_tokens": corpus.num_held_out_tokens,
        "held_out": corpus.held_out,
        "counting_options": dict(options),
        "weights": corpus.weights,
        "coverage": coverage,
        "measured_on": measured_on,
        "forced": [
            {"id": item.target_id, "token": item.token, "reasons": list(item.reasons)}
            for item in forced
        ],
        "displaced": list(displaced),
        "num_unseen": num_unseen,
    }
