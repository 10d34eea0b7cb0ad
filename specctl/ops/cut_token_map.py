"""Cut token maps of any number of sizes from one count artefact, and say what each is worth.

Invariants: nothing is written before every size was proved possible; the files depend on the
counts, the tokenizer's directory, the weights and the sizes, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path

from specctl.checkpoint import digest_file
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.vocabulary_map import map_digest
from specctl.ops.find_tokenizer import find_tokenizer
from specctl.ops.token_map_cost import CostOptions, cost_facts
from specctl.ops.token_map_ranks import read_count_source
from specctl.ops.token_map_report import (
    BuiltMap,
    CorpusFacts,
    Recommendation,
    TokenMapReport,
    corpus_facts,
    provenance,
)
from specctl.ops.token_map_slices import Measured, measured_slices
from specctl.ops.token_map_warnings import warnings_of
from specctl.tokenmap.cost import MODEL, NEAR_BEST, CostFacts, best_size, estimate
from specctl.tokenmap.counting import LoadedTokenizer, load_tokenizer
from specctl.tokenmap.counts import CountArtefact
from specctl.tokenmap.coverage import (
    ASSUMPTION,
    allowed_sizes,
    coverage_at,
    cumulative_hits,
    curve_sizes,
    slice_coverage,
    smallest_within,
)
from specctl.tokenmap.forced import TargetIds, find_forced_ids
from specctl.tokenmap.outputs import check_outputs
from specctl.tokenmap.selection import Ranking, rank, refusals, select, weighted_counts
from specctl.tokenmap.sizes import integer_weights
from specctl.tokenmap.writing import remove_map_beside, write_token_map

OUTPUT = "token-map"


@dataclass(frozen=True, kw_only=True, slots=True)
class CutOptions:
    """What is cut and where it goes.

    Args:
        sizes: ids in each map, ascending; empty: the recommended size.
        divisible_by: ranks that share the head; every size is a multiple.
        max_loss: recommend the smallest size that loses at most so much coverage against all ids
            seen; None: the size that the cost model chooses.
        weights: domain -> weight, 1 where there is none. They say how served text is mixed, so
            they count for selection and for coverage alike.
        keep: further ids, tokens or ranges of characters to force in.
        outputs: files with what the target wrote; coverage is then measured on them.
        cost: what is known of serving.
        output: directory for the files; with several sizes each has its own inside.
    """

    sizes: tuple[int, ...] = ()
    divisible_by: int = 1
    max_loss: float | None = None
    weights: Mapping[str, Decimal]
    keep: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    cost: CostOptions = field(default_factory=CostOptions)
    output: Path = Path(OUTPUT)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """Everything that is known before a size is chosen.

    Args:
        per_id: [tokenizer_size] weighted occurrences in the counted text.
        hits: cumulative weighted occurrences in the measured text, by rank.
        total: weighted occurrences in the measured text.
    """

    target: TargetIds
    target_vocab_size: int
    per_id: list[int]
    ranking: Ranking
    measured: Measured
    hits: Sequence[int]
    total: int
    cost: CostFacts

    def coverage(self, size: int) -> float:
        """Return the measured coverage of a map of `size` ids."""
        return self.hits[size] / self.total if self.total else 1.0


def cut_token_map(
    artefact: CountArtefact,
    tokenizer: LoadedTokenizer,
    options: CutOptions,
    *,
    found: Sequence[Diagnostic] = (),
    where: str = "--counts",
) -> TokenMapReport:
    """Cut, write and report.

    Args:
        artefact: counts of this tokenizer.
        tokenizer: of the target.
        options: what to cut.
        found: warnings of counting, to be reported first.
        where: place of the counts for diagnostics.

    Raises:
        DiagnosticError: SD433 for counts of another tokenizer, SD415, SD421, SD422, SD423, SD426,
            SD440, and codes of families 1 and 7 for files that cannot be read.
    """
    _check_tokenizer(artefact, tokenizer, where)
    plan = _plan(artefact, tokenizer, options, where)
    problems = refusals(plan.ranking, options.sizes, options.divisible_by)
    if problems:
        raise DiagnosticError(problems)
    recommended = _recommend(plan, options)
    sizes = options.sizes or (recommended.size,)
    corpus = corpus_facts(
        artefact, {name: str(weight) for name, weight in sorted(options.weights.items())}
    )
    maps = tuple(
        _built(size, plan, corpus, artefact, options, is_alone=len(sizes) == 1) for size in sizes
    )
    if len(sizes) > 1:
        remove_map_beside(options.output)
    shown = sorted({*curve_sizes(plan.ranking), *sizes, recommended.size})
    slices = tuple(slice_coverage(plan.ranking, part, shown) for part in plan.measured.slices)
    return TokenMapReport(
        tokenizer=str(tokenizer.path),
        tokenizer_size=tokenizer.size,
        tokenizer_digest=tokenizer.digest,
        target_vocab_size=plan.target_vocab_size,
        corpus=corpus,
        measured_on=plan.measured.name,
        maps=maps,
        recommended=recommended,
        cost_model=MODEL,
        cost=plan.cost,
        coverage_of_seen=plan.coverage(plan.ranking.num_seen),
        num_seen=plan.ranking.num_seen,
        curve=tuple(estimate(plan.cost, size, plan.coverage(size)) for size in shown),
        slices=slices,
        forced=plan.target.forced,
        num_reserved=plan.target.num_reserved,
        diagnostics=(
            *found,
            *warnings_of(
                maps,
                slices,
                plan.measured,
                corpus,
                plan.coverage(plan.ranking.num_seen),
                plan.cost,
                where,
            ),
        ),
    )


def refuse_what_counts_cannot_mend(tokenizer: LoadedTokenizer, options: CutOptions) -> None:
    """Refuse, before anything is counted, what no counts of this tokenizer make possible.

    Args:
        tokenizer: of the target.
        options: what is to be cut.

    Raises:
        DiagnosticError: SD415, SD421, SD423 and SD426 of sizes, kept ids and outputs, and family 7
            codes of the manifest of the cost model.
    """
    target = find_forced_ids(tokenizer, options.keep)
    target_vocab_size = _target_vocab_size(tokenizer, target)
    ranking = rank(
        [0] * tokenizer.size,
        (forced.target_id for forced in target.forced),
        without_token=target.without_token,
    )
    problems = refusals(ranking, options.sizes, options.divisible_by)
    if problems:
        raise DiagnosticError(problems)
    check_outputs(options.outputs)
    cost_facts(
        options.cost,
        directory=tokenizer.path.parent,
        target_vocab_size=target_vocab_size,
        measured=None,
    )


def cut_from_file(
    counts: Path, *, tokenizer: str | Path | None, options: CutOptions
) -> TokenMapReport:
    """Cut maps from a count file, or from a list of ids by frequency.

    A list without a size gives a map of its own size.

    Args:
        counts: the file.
        tokenizer: directory with tokenizer.json, or that file; None: the target of
            `manifest.yaml` in the working directory.
        options: what to cut.

    Raises:
        DiagnosticError: as `cut_token_map`, `find_tokenizer` and `read_count_source`.
    """
    loaded = load_tokenizer(find_tokenizer(tokenizer))
    source = read_count_source(counts, loaded)
    if source.num_listed is not None and not options.sizes and not options.outputs:
        options = replace(options, sizes=(source.num_listed,))
    return cut_token_map(source.artefact, loaded, options, found=source.found, where=str(counts))


def _check_tokenizer(artefact: CountArtefact, tokenizer: LoadedTokenizer, where: str) -> None:
    facts = artefact.facts
    if facts.tokenizer_digest == tokenizer.digest and facts.tokenizer_size == tokenizer.size:
        return
    raise DiagnosticError(
        diagnose(
            "SD433",
            where=where,
            message=f"the counts are of another tokenizer than `{tokenizer.path}`",
            expected=f"{tokenizer.size} ids, {tokenizer.digest}",
            found=f"{facts.tokenizer_size} ids, {facts.tokenizer_digest}",
        )
    )


def _plan(
    artefact: CountArtefact, tokenizer: LoadedTokenizer, options: CutOptions, where: str
) -> _Plan:
    domains = artefact.counted.domains
    if not artefact.counted.num_tokens:
        raise DiagnosticError(diagnose("SD422", where=where, message="the texts give no token"))
    _check_weights(options.weights, tuple(domain.name for domain in domains))
    target = find_forced_ids(tokenizer, options.keep)
    target_vocab_size = _target_vocab_size(tokenizer, target)
    weights = integer_weights((domain.name for domain in domains), options.weights)
    per_id = weighted_counts([domain.per_id for domain in domains], weights, tokenizer.size)
    ranking = rank(
        per_id,
        (forced.target_id for forced in target.forced),
        without_token=target.without_token,
    )
    measured = measured_slices(artefact, tokenizer, options.weights, options.outputs)
    hits = cumulative_hits(ranking, measured.whole.per_id)
    return _Plan(
        target=target,
        target_vocab_size=target_vocab_size,
        per_id=per_id,
        ranking=ranking,
        measured=measured,
        hits=hits,
        total=measured.whole.total,
        cost=cost_facts(
            options.cost,
            directory=tokenizer.path.parent,
            target_vocab_size=target_vocab_size,
            measured=measured.drafts,
        ),
    )


def _check_weights(weights: Mapping[str, Decimal], domains: Sequence[str]) -> None:
    unknown = sorted(set(weights) - set(domains))
    if unknown:
        raise DiagnosticError(
            [
                diagnose(
                    "SD440",
                    where=f"--weight {name}={weights[name]}",
                    message=f"no domain `{name}` was counted",
                    expected=", ".join(domains),
                    found=name,
                )
                for name in unknown
            ]
        )
    if domains and all(weights.get(name) == 0 for name in domains):
        raise DiagnosticError(
            diagnose(
                "SD440",
                where="--weight",
                message="every domain has weight 0: no token is left",
                expected="one weight above 0",
                found="none",
            )
        )


def _target_vocab_size(tokenizer: LoadedTokenizer, target: TargetIds) -> int:
    """Return the target's embedding rows, the tokenizer's size when no config states them."""
    rows = target.target_vocab_size
    if rows is None or rows >= tokenizer.size:
        return tokenizer.size if rows is None else rows
    raise DiagnosticError(
        diagnose(
            "SD415",
            where="config.json#/vocab_size",
            message=f"the tokenizer has {tokenizer.size} ids, the embedding {rows} rows",
            expected=f"at least {tokenizer.size}",
            found=rows,
        )
    )


def _recommend(plan: _Plan, options: CutOptions) -> Recommendation:
    sizes = allowed_sizes(plan.ranking, options.divisible_by)
    choice = best_size(plan.cost, sizes, plan.coverage)
    if options.max_loss is None:
        return Recommendation(
            size=choice.best.size,
            rule="cost model",
            text=f"the size of highest estimated speed; from {choice.near_low} to "
            f"{choice.near_high} ids it is within {1 - NEAR_BEST:.1%} of it",
            near_low=choice.near_low,
            near_high=choice.near_high,
        )
    hits = cumulative_hits(plan.ranking, plan.measured.whole.per_id)
    return Recommendation(
        size=smallest_within(plan.ranking, hits, options.max_loss, sizes),
        rule="max loss",
        text=f"the smallest size whose coverage is within {options.max_loss:g} of that of all ids "
        f"seen ({coverage_at(hits, plan.ranking.num_seen):.2%}); assumes that {ASSUMPTION}",
        near_low=choice.near_low,
        near_high=choice.near_high,
    )


def _built(
    size: int,
    plan: _Plan,
    corpus: CorpusFacts,
    artefact: CountArtefact,
    options: CutOptions,
    *,
    is_alone: bool,
) -> BuiltMap:
    """Write one map and return what it is."""
    selection = select(plan.ranking, plan.per_id, size)
    directory = options.output if is_alone else options.output / str(size)
    origin = "given" if options.sizes else "derived"
    digest = map_digest(selection.ids_target)
    coverage = plan.coverage(size)
    paths = write_token_map(
        directory,
        selection.ids_target,
        ids_by_rank=selection.ids_by_rank,
        target_vocab_size=plan.target_vocab_size,
        provenance=provenance(
            corpus,
            plan.target.forced,
            size=size,
            size_origin=origin,
            map_digest=digest,
            coverage=coverage,
            measured_on=plan.measured.name,
            target_vocab_size=plan.target_vocab_size,
            tokenizer_size=artefact.facts.tokenizer_size,
            tokenizer_digest=artefact.facts.tokenizer_digest,
            options=artefact.facts.options,
            displaced=selection.displaced,
            num_unseen=selection.num_unseen,
        ),
    )
    return BuiltMap(
        size=size,
        size_origin="given" if options.sizes else "derived",
        coverage=coverage,
        estimate=estimate(plan.cost, size, coverage),
        displaced=selection.displaced,
        num_unseen=selection.num_unseen,
        map_digest=digest,
        directory=str(directory),
        files={path.name: digest_file(path, where=str(path)) for path in paths},
    )
