"""Build token maps: find the corpus and the tokenizer, count, cut, write, say what was done.

Invariants: nothing is written before everything was counted; the files depend on the texts, the
tokenizer, the forced ids and the sizes, not on the order or number of corpus files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.ops.cut_token_map import CutOptions, cut_token_map
from specctl.ops.find_tokenizer import find_tokenizer
from specctl.ops.token_map_report import TokenMapReport
from specctl.tokenmap.counting import (
    Counter,
    Counts,
    LoadedTokenizer,
    TokenizersCounter,
    load_tokenizer,
)
from specctl.tokenmap.counts import (
    CountArtefact,
    CountFacts,
    CountTable,
    domain_counts,
    read_counts,
    write_counts,
)
from specctl.tokenmap.documents import Advance, Corpus, find_corpus
from specctl.tokenmap.split import (
    HELD_OUT_EVERY,
    Survey,
    counted_documents,
    held_out_documents,
    survey,
)

Progress = Callable[[str, int, int], None]
"""Called with the phase, the bytes done and about the bytes in total, of that phase."""


def build_token_map(
    corpus: Sequence[str | Path],
    *,
    tokenizer: str | Path | None = None,
    options: CutOptions,
    fields: Sequence[str] = (),
    roles: Sequence[str] = (),
    counts: Path | None = None,
    progress: Progress | None = None,
    make_counter: Callable[[LoadedTokenizer], Counter] = TokenizersCounter,
) -> TokenMapReport:
    """Count a corpus and write its token maps.

    Args:
        corpus: files, directories or patterns.
        tokenizer: directory with tokenizer.json, or that file; None: the target of
            `manifest.yaml` in the working directory.
        options: what to cut from the counts.
        fields: keys of jsonl lines to join.
        roles: chat roles that count; empty: all.
        counts: file that the counts are kept in; one that is there is used when it was made from
            the same texts, tokenizer and options, and refused otherwise.
        progress: called while counting.
        make_counter: the counter to use; another one may be faster, never different.

    Raises:
        DiagnosticError: SD415, SD421 to SD440, SD119, SD120, and codes of families 1 and 7 for
            files that cannot be read.
    """
    texts = find_corpus(corpus, fields=fields, roles=roles)
    loaded = load_tokenizer(find_tokenizer(tokenizer))
    plan = survey(texts, _tally(progress, "reading", texts.num_bytes))
    artefact = None if counts is None else _kept_counts(counts, plan, loaded, fields, roles)
    if artefact is None:
        counted, held_out = _count_both(texts, plan, make_counter(loaded), progress)
        artefact = _artefact(plan, loaded, counted, held_out, fields, roles)
        if counts is not None:
            write_counts(counts, artefact)
    where = str(texts.files[0])
    return cut_token_map(artefact, loaded, options, found=_replaced(plan), where=where)


def _kept_counts(
    path: Path,
    plan: Survey,
    loaded: LoadedTokenizer,
    fields: Sequence[str],
    roles: Sequence[str],
) -> CountArtefact | None:
    """Return the counts of a file that is there, None when none is.

    Raises:
        DiagnosticError: SD433 when they belong to something else, SD432 when they are damaged.
    """
    if not path.exists():
        return None
    artefact = read_counts(path)
    facts = artefact.facts
    wanted = {
        "corpus": plan.corpus_digest,
        "tokenizer": loaded.digest,
        **{f"option {name}": text for name, text in _options(fields, roles).items()},
    }
    found = {
        "corpus": facts.corpus_digest,
        "tokenizer": facts.tokenizer_digest,
        **{f"option {name}": text for name, text in facts.options.items()},
    }
    for name in sorted({*wanted, *found}):
        if wanted.get(name) != found.get(name):
            raise DiagnosticError(
                diagnose(
                    "SD433",
                    where=str(path),
                    message=f"the counts were made with another {name}",
                    expected=wanted.get(name, "nothing"),
                    found=found.get(name, "nothing"),
                )
            )
    return artefact


def _options(fields: Sequence[str], roles: Sequence[str]) -> dict[str, str]:
    given = {"fields": ",".join(fields), "roles": ",".join(roles)}
    return {name: text for name, text in given.items() if text}


def _artefact(
    plan: Survey,
    loaded: LoadedTokenizer,
    counted: Counts,
    held_out: Counts,
    fields: Sequence[str],
    roles: Sequence[str],
) -> CountArtefact:
    def table(counts: Counts, num_bytes: int) -> CountTable:
        row = domain_counts(
            "corpus",
            counts.per_id,
            num_documents=counts.num_documents,
            num_text_bytes=num_bytes,
        )
        return CountTable(domains=(row,))

    return CountArtefact(
        facts=CountFacts(
            tokenizer_digest=loaded.digest,
            tokenizer_size=loaded.size,
            corpus_digest=plan.corpus_digest,
            method="batch",
            method_reason="every document was encoded whole",
            held_out=f"one document in {HELD_OUT_EVERY}, by its content",
            options=_options(fields, roles),
        ),
        counted=table(counted, plan.num_text_bytes),
        held_out=table(held_out, 0) if plan.has_held_out else CountTable(domains=()),
    )


def _replaced(plan: Survey) -> list[Diagnostic]:
    if plan.first_replaced is None:
        return []
    return [
        diagnose(
            "SD430",
            where=plan.first_replaced,
            message=f"{plan.num_replaced} documents held half surrogate pairs, first here",
            expected="characters",
            found="half surrogate pairs, counted as U+FFFD",
        )
    ]


def _tally(progress: Progress | None, phase: str, total: int) -> Advance | None:
    """Return a function that adds up what it is told and passes the sum on."""
    if progress is None:
        return None
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(phase, done, total)

    return advance


def _count_both(
    texts: Corpus, plan: Survey, counter: Counter, progress: Progress | None
) -> tuple[Counts, Counts]:
    """Return the counts of the counted and of the held-out documents."""
    advance = _tally(progress, "counting", plan.num_text_bytes)
    digest = plan.corpus_digest
    counted = counter.count(counted_documents(texts, plan), corpus_digest=digest, advance=advance)
    held = counter.count(held_out_documents(texts, plan), corpus_digest=digest, advance=advance)
    num_documents = counted.num_documents + held.num_documents
    if num_documents != plan.num_documents:
        raise DiagnosticError(
            diagnose(
                "SD429",
                where=str(texts.files[0]),
                message=f"{num_documents} documents were counted, {plan.num_documents} were there",
                expected=plan.num_documents,
                found=num_documents,
            )
        )
    return counted, held
