"""What to know about maps that were cut: unseen ids, thin corpora, slices covered badly.

Rule: a text that is measured, outputs or held out, has at least `_ENOUGH_TOKENS`: two standard
errors of a coverage of 90 % are then one point. Tokens count as independent; those of one answer
are not, so the true error is larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.ops.token_map_cost import ASSUMED
from specctl.ops.token_map_report import BuiltMap, CorpusFacts
from specctl.ops.token_map_slices import COUNTED, NOTHING, OUTPUTS, OUTPUTS_SLICE, Measured
from specctl.tokenmap.cost import CostFacts
from specctl.tokenmap.coverage import SliceCoverage

_ENOUGH_SEEN = 0.99
_LOW_COVERAGE = 0.95
_FAR_BELOW = 0.02
_USUAL_COVERAGE = 0.9
_MAX_ERROR = 0.01
_ENOUGH_TOKENS = round(4 * _USUAL_COVERAGE * (1 - _USUAL_COVERAGE) / _MAX_ERROR**2)
"""3,600 tokens, where `_error` is `_MAX_ERROR`."""


def warnings_of(
    maps: Sequence[BuiltMap],
    slices: Sequence[SliceCoverage],
    measured: Measured,
    corpus: CorpusFacts,
    coverage_of_seen: float,
    cost: CostFacts,
    where: str,
) -> list[Diagnostic]:
    """Return SD407, SD427, SD428, SD431, SD438, SD439, SD443 and SD444 where they apply.

    Args:
        maps: that were written.
        slices: curves that hold the size of every map.
        measured: what coverage was measured on.
        corpus: of the counts.
        coverage_of_seen: measured coverage of all ids seen in the counted text.
        cost: numbers of the cost model.
        where: place of the corpus.
    """
    findings = _of_text(measured, corpus, coverage_of_seen, where)
    findings += [*_of_length(measured, where), *_of_drafts(measured, cost)]
    for built in maps:
        findings += _of_map(built)
        findings += _of_slices(built, slices)
    return findings


def _of_text(
    measured: Measured, corpus: CorpusFacts, coverage_of_seen: float, where: str
) -> list[Diagnostic]:
    findings: list[Diagnostic] = []
    if measured.name == COUNTED:
        findings.append(
            diagnose(
                "SD427",
                where=where,
                message=f"{corpus.num_documents} documents were counted and none was held out",
                expected="two different texts or more, or `--held-out PATH`",
                found="no held-out text",
            )
        )
    elif measured.name != NOTHING and coverage_of_seen < _ENOUGH_SEEN:
        findings.append(
            diagnose(
                "SD431",
                where=where,
                message=f"{1 - coverage_of_seen:.2%} of the tokens of {measured.name} are ids that "
                "the counted text never shows",
                expected=f"at most {1 - _ENOUGH_SEEN:.0%}",
                found=f"{1 - coverage_of_seen:.2%}",
            )
        )
    if measured.num_outside:
        findings.append(
            diagnose(
                "SD438",
                where="--outputs",
                message=f"{measured.num_outside} output tokens have ids that the tokenizer does "
                "not have",
                expected="ids of the target's tokenizer",
                found=f"{measured.num_outside} of {measured.whole.num_tokens} tokens",
                help="Give the tokenizer of the target that wrote them; such tokens count as lost",
            )
        )
    return findings


def _of_length(measured: Measured, where: str) -> list[Diagnostic]:
    """Return SD444 for a text too short to choose a size from; SD427 is of counted text."""
    num_tokens = measured.whole.num_tokens
    if measured.name in (COUNTED, NOTHING) or num_tokens >= _ENOUGH_TOKENS:
        return []
    return [
        diagnose(
            "SD444",
            where="--outputs" if measured.name == OUTPUTS else where,
            message=f"coverage is measured on {num_tokens} tokens of {measured.name}: two standard "
            f"errors of {_USUAL_COVERAGE:.0%} are {100 * _error(num_tokens):.1f} points",
            expected=f"{_ENOUGH_TOKENS} tokens or more",
            found=f"{num_tokens} tokens",
        )
    ]


def _error(num_tokens: int) -> float:
    """Return two standard errors of the usual coverage, measured on so many tokens."""
    return 2 * sqrt(_USUAL_COVERAGE * (1 - _USUAL_COVERAGE) / max(1, num_tokens))


def _of_drafts(measured: Measured, cost: CostFacts) -> list[Diagnostic]:
    """Return SD443 where a benchmark measured another head, and nothing else gives acceptance."""
    drafts = measured.drafts
    if drafts is None or drafts.reduced is None or cost.origins["acceptance"] != ASSUMED:
        return []
    return [
        diagnose(
            "SD443",
            where=drafts.reduced.where,
            message=f"the benchmark's accept length of {drafts.accept_length:.3f} is that of a "
            f"reduced head and was not taken; acceptance {cost.acceptance:g} is assumed",
            expected=f"a head of {cost.target_vocab_size} rows",
            found=f"{drafts.reduced.draft_vocab_size} rows",
        )
    ]


def _of_map(built: BuiltMap) -> list[Diagnostic]:
    findings: list[Diagnostic] = []
    if built.num_unseen:
        findings.append(
            diagnose(
                "SD428",
                where=f"--size {built.size}",
                message=f"{built.num_unseen} of {built.size} ids never occur in the counted text; "
                "the lowest ids fill these places",
                expected=f"at most {built.size - built.num_unseen} ids for this corpus",
                found=f"{built.size} ids",
            )
        )
    if built.size % 2:
        findings.append(
            diagnose(
                "SD407",
                where=f"--size {built.size}",
                message=f"a head of {built.size} rows cannot be shared by an even number of ranks",
                expected="a multiple of 64",
                found=built.size,
            )
        )
    return findings


def _of_slices(built: BuiltMap, slices: Sequence[SliceCoverage]) -> list[Diagnostic]:
    """Return SD439 for each slice that is covered badly and worse than the whole."""
    findings: list[Diagnostic] = []
    for part in slices:
        coverage = part.at(built.size)
        if part.kind == "all" or part.name == OUTPUTS_SLICE:
            continue
        if coverage >= _LOW_COVERAGE or coverage >= built.coverage - _FAR_BELOW:
            continue
        findings.append(
            diagnose(
                "SD439",
                where=f"--size {built.size}",
                message=f"the map holds {coverage:.1%} of the tokens of {part.kind} `{part.name}`, "
                f"{built.coverage:.1%} of all measured ones",
                expected=f"at least {_LOW_COVERAGE:.0%}",
                found=f"{coverage:.1%}",
            )
        )
    return findings
