"""Build a token map: find the corpus and the tokenizer, count, choose, write, say what was done.

Invariants: nothing is written before everything was counted; the files depend on the texts, the
tokenizer, the forced ids and the size, not on the order or number of corpus files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from specctl.checkpoint import digest_file, source_directory
from specctl.contract.codec import load_manifest
from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.contract.digests import resolve_source as resolve_manifest_path
from specctl.contract.file_names import TOKENIZER
from specctl.ops.token_map_report import (
    MapChoice,
    TokenMapReport,
    map_facts,
    provenance,
    written_report,
)
from specctl.tokenmap.counting import (
    Counter,
    Counts,
    LoadedTokenizer,
    TokenizersCounter,
    load_tokenizer,
)
from specctl.tokenmap.coverage import (
    MAX_LOSS,
    coverage_at,
    coverage_curve,
    cumulative_hits,
    recommended_size,
)
from specctl.tokenmap.documents import Advance, Corpus, find_corpus
from specctl.tokenmap.files import write_token_map
from specctl.tokenmap.forced import TargetIds, find_forced_ids
from specctl.tokenmap.selection import rank, select
from specctl.tokenmap.split import (
    Survey,
    counted_documents,
    held_out_documents,
    survey,
)

MANIFEST = "manifest.yaml"
OUTPUT = "token-map"

Progress = Callable[[Literal["reading", "counting"], int, int], None]
"""Called with the phase, the bytes done and about the bytes in total, of that phase."""


def build_token_map(
    corpus: Sequence[str | Path],
    *,
    tokenizer: str | Path | None = None,
    size: int | None = None,
    max_loss: float = MAX_LOSS,
    fields: Sequence[str] = (),
    roles: Sequence[str] = (),
    keep: Sequence[str] = (),
    output: Path | str = OUTPUT,
    progress: Progress | None = None,
    make_counter: Callable[[LoadedTokenizer], Counter] = TokenizersCounter,
) -> TokenMapReport:
    """Count a corpus and write its token map.

    Args:
        corpus: files, directories or patterns.
        tokenizer: directory with tokenizer.json, or that file; None: the target of
            `manifest.yaml` in the working directory.
        size: ids in the map; None: `recommended_size`.
        max_loss: held-out coverage that the recommended size may give up.
        fields: keys of jsonl lines to join.
        roles: chat roles that count; empty: all.
        keep: further ids or tokens to force in.
        output: directory for the files.
        progress: called while counting.
        make_counter: the counter to use; another one may be faster, never different.

    Raises:
        DiagnosticError: SD415, SD421 to SD429, SD119, SD120, and codes of families 1 and 7 for
            files that cannot be read.
    """
    texts = find_corpus(corpus, fields=fields, roles=roles)
    loaded = load_tokenizer(find_tokenizer(tokenizer))
    target = find_forced_ids(loaded, keep)
    target_vocab_size = _target_vocab_size(loaded, target)
    plan = survey(texts, _tally(progress, "reading", texts.num_bytes))
    counted, held_out = _count_both(texts, plan, make_counter(loaded), progress)
    choice = _choose(counted, held_out, target, size, max_loss)
    facts = map_facts(
        texts, loaded, target, plan, (counted, held_out), choice, max_loss, target_vocab_size
    )
    paths = write_token_map(
        Path(output),
        choice.selection.ids_target,
        target_vocab_size=target_vocab_size,
        provenance=provenance(facts),
    )
    files = {path.name: digest_file(path, where=str(path)) for path in paths}
    return written_report(facts, directory=str(output), files=files)


def find_tokenizer(source: str | Path | None) -> Path:
    """Return the tokenizer.json that a source or the manifest in the working directory means.

    Raises:
        DiagnosticError: SD424 when there is none; SD119, SD120 for a source that is no directory,
            SD136 to SD147 for one on a hub;
            family 7 codes of an unreadable manifest.
    """
    if source is not None:
        path = Path(source).expanduser()
        directory = path.parent if path.is_file() else source_directory(source)
        name = path.name if path.is_file() else TOKENIZER
        return _existing(directory / name, f"--tokenizer {source}")
    manifest_path = Path(MANIFEST)
    if not manifest_path.is_file():
        raise DiagnosticError(
            diagnose(
                "SD424",
                where=f"{MANIFEST}#/target/source",
                message=f"no `--tokenizer` was given and there is no `{MANIFEST}` here",
                expected=f"`--tokenizer DIR`, or `{MANIFEST}` in the working directory",
                found="neither",
            )
        )
    manifest = load_manifest(manifest_path)
    directory = resolve_manifest_path(manifest.target.source, manifest_path.parent)
    return _existing(directory / TOKENIZER, f"{MANIFEST}#/target/source")


def _target_vocab_size(loaded: LoadedTokenizer, target: TargetIds) -> int:
    """Return the target's embedding rows, the tokenizer's size when no config states them."""
    rows = target.target_vocab_size
    if rows is None or rows >= loaded.size:
        return loaded.size if rows is None else rows
    raise DiagnosticError(
        diagnose(
            "SD415",
            where="config.json#/vocab_size",
            message=f"the tokenizer has {loaded.size} ids, the embedding {rows} rows",
            expected=f"at least {loaded.size}",
            found=rows,
        )
    )


def _existing(path: Path, where: str) -> Path:
    if path.is_file():
        return path
    raise DiagnosticError(
        diagnose(
            "SD424",
            where=where,
            message=f"`{path.parent}` has no `{path.name}`",
            expected=path.name,
            found="no such file",
        )
    )


def _tally(
    progress: Progress | None, phase: Literal["reading", "counting"], total: int
) -> Advance | None:
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
    if counted.num_tokens == 0:
        raise DiagnosticError(
            diagnose("SD422", where=str(texts.files[0]), message="the texts give no token")
        )
    return counted, held if plan.has_held_out else counted


def _choose(
    counted: Counts, held_out: Counts, target: TargetIds, size: int | None, max_loss: float
) -> MapChoice:
    ranking = rank(counted.per_id, (forced.target_id for forced in target.forced))
    hits = cumulative_hits(ranking, held_out.per_id)
    recommended = recommended_size(ranking, hits, max_loss)
    chosen = recommended if size is None else size
    selection = select(ranking, counted.per_id, chosen)
    return MapChoice(
        selection=selection,
        size_origin="derived" if size is None else "given",
        recommended=recommended,
        coverage=coverage_at(hits, chosen),
        coverage_of_seen=coverage_at(hits, ranking.num_seen),
        curve=coverage_curve(ranking, hits, (chosen, recommended)),
    )
