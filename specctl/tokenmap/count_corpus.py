"""Count a corpus with all cores: tasks to workers, parts on disk, one exact sum at the end.

Invariants: the artefact depends on the documents, the tokenizer and the options, not on workers,
order, engine or interruptions; memory is bounded for any corpus size. A run that was stopped goes
on from its parts when tokenizer, files and options are the same, and is refused when they are not.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.fingerprint import digest_bytes
from specctl.tokenmap.chat import ChatTemplate, load_chat_template
from specctl.tokenmap.corpus_notes import (
    idle_options,
    left_out_arrays,
    refuse_empty,
    run_diagnostics,
)
from specctl.tokenmap.counting import LoadedTokenizer
from specctl.tokenmap.counts import CountArtefact
from specctl.tokenmap.parts import part_path, read_part
from specctl.tokenmap.readers import Reading, missing_package
from specctl.tokenmap.resume import (
    FinishedRun,
    finished_run,
    keep_run,
    parts_directory,
)
from specctl.tokenmap.sources import (
    ID_SUFFIXES,
    SourceFile,
    Task,
    files_digest,
    find_files,
    plan_tasks,
    without_arrays,
)
from specctl.tokenmap.structure import FastPlan, plan_fast
from specctl.tokenmap.totals import Totals, artefact_of
from specctl.tokenmap.worker import NUMBERS, Job, run_task, start_worker

HELD_OUT = 0.1

CountProgress = Callable[[Literal["reading", "encoding"], int, int], None]
"""Called with the phase, bytes (reading) or tasks (encoding) done, and in total."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSpec:
    """What to count.

    Args:
        sources: `PATH`, `NAME=PATH`, quoted patterns or `-`.
        fields: keys of jsonl lines or rows whose texts are joined; empty: by the usual names.
        roles: chat roles that count; empty: all.
        language_field: key that names a document's language; None: by suffix or script.
        held_out: part of the documents that measures coverage, 0 to 1, chosen by content.
        held_out_sources: files that measure coverage; then `held_out` is not used.
        id_type: element type of `.bin` files of token ids.
        uses_chat_template: messages are rendered with the template beside tokenizer.json; then
            each turn of `roles` is one document, or the whole conversation without roles.
    """

    sources: tuple[str, ...]
    fields: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    language_field: str | None = None
    held_out: float = HELD_OUT
    held_out_sources: tuple[str, ...] = ()
    id_type: Literal["u16", "u32", "i64"] | None = None
    uses_chat_template: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CountOptions:
    """How to count; none of these changes a count.

    Args:
        workers: processes, None: one for each core.
        counts: file that receives the artefact and beside which parts are kept; None: neither.
        method: `auto`, or `batch` to encode every document whole.
        engine: `local` processes or `ray`.
        ray_address: of a cluster, None: a local one.
    """

    workers: int | None = None
    counts: Path | None = None
    method: Literal["auto", "batch"] = "auto"
    engine: Literal["local", "ray"] = "local"
    ray_address: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CountResult:
    """An artefact and what was found on the way.

    Args:
        artefact: the counts.
        diagnostics: SD423, SD427, SD430, SD434 and SD805.
    """

    artefact: CountArtefact
    diagnostics: tuple[Diagnostic, ...]


def count_corpus(
    corpus: CorpusSpec,
    tokenizer: LoadedTokenizer,
    options: CountOptions | None = None,
    progress: CountProgress | None = None,
) -> CountResult:
    """Count every document of a corpus on both sides of its split.

    Raises:
        DiagnosticError: SD422 for no text, SD423 where none can be read, SD429 for files that
            changed meanwhile, SD433 for a count file of another run, SD425 for a missing chat
            template, SD435 for a missing package, SD432 and family 1 codes for a damaged count
            file.
    """
    options = options or CountOptions()
    named = _files(corpus)
    files = without_arrays(named)
    idle = idle_options(
        files, fields=corpus.fields, language=corpus.language_field, ids=corpus.id_type
    )
    if any(file.kind in ID_SUFFIXES for file in files):
        return _result(_count_ids(files, corpus, tokenizer, options, progress), idle)
    plan = choose_plan(tokenizer, options.method)
    chat = load_chat_template(tokenizer.path.parent) if corpus.uses_chat_template else None
    facts = _option_facts(corpus, chat)
    read = {**facts, "tokenizer": tokenizer.digest}
    run_digest = files_digest(files, read)
    finished = finished_run(options.counts, run_digest)
    if finished is not None:
        return _result(finished, idle)
    tasks = plan_tasks(files)
    run = _Run(
        tokenizer=tokenizer, plan=plan if isinstance(plan, FastPlan) else None, options=options
    )
    with parts_directory(options.counts, run_digest) as directory:
        job = Job(
            tokenizer=tokenizer.path,
            plan=None if run.plan is None else run.plan.units,
            reading=Reading(
                fields=corpus.fields,
                roles=corpus.roles,
                language_field=corpus.language_field,
                can_cut=run.plan is not None and not run.plan.units.first_differs,
                chat=chat,
            ),
            held_below=0 if corpus.held_out_sources else int(corpus.held_out * NUMBERS),
            directory=directory,
        )
        totals = _count(tasks, job, run, progress)
        if not corpus.held_out_sources and corpus.held_out > 0:
            totals = _balanced(totals, tasks, job, run)
        if totals.num_documents == 0:
            refuse_empty(totals.defects, files, corpus.roles)
        _refuse_changed(files, read, run_digest)
        artefact = artefact_of(totals, tokenizer, plan, facts, _rule(corpus))
        defects = {**totals.defects, **left_out_arrays(named, files)}
        keep_run(options.counts, run_digest, artefact, defects)
    return _result(FinishedRun(artefact=artefact, defects=defects), idle)


def _count_ids(
    files: Sequence[SourceFile],
    corpus: CorpusSpec,
    tokenizer: LoadedTokenizer,
    options: CountOptions,
    progress: CountProgress | None,
) -> FinishedRun:
    """Count a corpus of token ids; it takes no texts beside them."""
    texts = [file for file in files if file.kind not in ID_SUFFIXES]
    if texts:
        raise DiagnosticError(
            diagnose(
                "SD423",
                where=texts[0].path,
                message="token ids and texts cannot be counted together",
                expected="only `.bin` and `.npy`, or only texts",
                help="Name one kind with a quoted pattern, such as 'corpus/**/*.npy'",
            )
        )
    if find_spec("numpy") is None:
        raise missing_package("numpy", files[0].path)
    from specctl.tokenmap.token_ids import artefact_of_ids

    facts = {"held_out": _rule(corpus), "id_type": corpus.id_type or ""}
    run_digest = files_digest(files, {**facts, "tokenizer": tokenizer.digest})
    finished = finished_run(options.counts, run_digest)
    if finished is not None:
        return finished
    artefact = artefact_of_ids(
        files,
        tokenizer,
        id_type=corpus.id_type,
        held_below=0 if corpus.held_out_sources else int(corpus.held_out * NUMBERS),
        held_out=_rule(corpus),
        progress=progress,
    )
    keep_run(options.counts, run_digest, artefact, {})
    return FinishedRun(artefact=artefact, defects={})


def choose_plan(tokenizer: LoadedTokenizer, method: Literal["auto", "batch"]) -> FastPlan | str:
    """Return the fast plan of a tokenizer, or why every document is encoded whole."""
    if method == "batch":
        return "asked for"
    missing = [name for name in ("numpy", "pyarrow") if find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed (`pip install 'specctl[tokenmap]'`)"
    return plan_fast(tokenizer.path.read_text("utf-8"))


def _files(corpus: CorpusSpec) -> tuple[SourceFile, ...]:
    files = find_files(corpus.sources)
    if not corpus.held_out_sources:
        return files
    held = find_files(corpus.held_out_sources, held_out=True)
    inside = {os.path.realpath(file.path) for file in held}
    return (*(f for f in files if os.path.realpath(f.path) not in inside), *held)


def _option_facts(corpus: CorpusSpec, chat: ChatTemplate | None) -> dict[str, str]:
    return {
        "chat_template": "" if chat is None else digest_bytes(repr(chat).encode("utf-8")),
        "fields": json.dumps(corpus.fields),
        "roles": json.dumps(corpus.roles),
        "language_field": json.dumps(corpus.language_field),
        "held_out": _rule(corpus),
    }


def _rule(corpus: CorpusSpec) -> str:
    if corpus.held_out_sources:
        return "files " + ", ".join(Path(source).name for source in corpus.held_out_sources)
    return f"fraction {corpus.held_out:g} of the documents, by the digest of their text"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What this process knows beside the job: it encodes the units that workers find."""

    tokenizer: LoadedTokenizer
    plan: FastPlan | None
    options: CountOptions


def _count(tasks: Sequence[Task], job: Job, run: _Run, progress: CountProgress | None) -> Totals:
    """Do the tasks that have no part yet, then add all parts."""
    total = sum(task.num_bytes for task in tasks)
    waiting = [task for task in tasks if not _is_done(job, task)]
    done = total - sum(task.num_bytes for task in waiting)
    by_number = {task.number: task for task in waiting}
    for number in _runner(run.options)(job, waiting, run.options):
        done += by_number[number].num_bytes
        if progress is not None:
            progress("reading", done, total)
    totals = Totals(run.tokenizer, run.plan)
    for place, task in enumerate(tasks, start=1):
        part = read_part(part_path(job.directory, task.number))
        if part is None:
            raise DiagnosticError(
                diagnose("SD429", where=task.files[0].path, message="a part of the run is gone")
            )
        totals.add(*part)
        if progress is not None:
            progress("encoding", place, len(tasks))
    totals.finish()
    return totals


def _is_done(job: Job, task: Task) -> bool:
    """Whether a part of an earlier run serves: units need the plan that says how to encode them."""
    part = read_part(part_path(job.directory, task.number))
    if part is None:
        return False
    return job.plan is not None or not any(result.has_units for result in part[1].values())


Runner = Callable[[Job, Sequence[Task], CountOptions], Iterator[int]]


def _runner(options: CountOptions) -> Runner:
    if options.engine == "ray":
        from specctl.tokenmap.ray_engine import run_on_ray

        return run_on_ray
    return _run_locally


def _run_locally(job: Job, tasks: Sequence[Task], options: CountOptions) -> Iterator[int]:
    """Yield the numbers of tasks as they are done."""
    workers = min(options.workers or os.cpu_count() or 1, len(tasks))
    uses_stdin = any(file.path == "-" for task in tasks for file in task.files)
    if workers <= 1 or uses_stdin:
        for task in tasks:
            yield run_task(job, task)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(
        workers, mp_context=context, initializer=start_worker, initargs=(os.getpid(),)
    ) as pool:
        remaining = iter(tasks)
        running = {pool.submit(run_task, job, task) for task in islice(remaining, 2 * workers)}
        while running:
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                yield future.result()
            for task in islice(remaining, len(finished)):
                running.add(pool.submit(run_task, job, task))


def _balanced(totals: Totals, tasks: Sequence[Task], job: Job, run: _Run) -> Totals:
    """Count a small corpus again when the rule left one side without a document."""
    changed = job
    for _ in range(2):
        if totals.has_both_sides or totals.lowest is None:
            return totals
        if totals.lowest == totals.highest and not changed.is_by_paragraph:
            changed = replace(changed, is_by_paragraph=True)
        elif totals.num_held_out == 0:
            if totals.lowest == totals.highest:  # one text: it is counted
                return totals
            changed = replace(changed, moved_in=totals.lowest)
        else:
            changed = replace(changed, moved_out=totals.highest)
        with tempfile.TemporaryDirectory(prefix="specctl-counts-") as name:
            again = replace(changed, directory=Path(name))
            totals = _count(tasks, again, run, None)
    return totals


def _refuse_changed(files: Sequence[SourceFile], options: dict[str, str], run_digest: str) -> None:
    """Refuse counts of files that were written while they were read."""
    if files_digest(files, options) != run_digest:
        raise DiagnosticError(
            diagnose(
                "SD429",
                where=files[0].path if len(files) == 1 else "CORPUS",
                message="files of the corpus changed or went while they were counted",
            )
        )


def _result(run: FinishedRun, idle: Sequence[Diagnostic]) -> CountResult:
    """Return the artefact with what is to be said of it, the same however it was come by."""
    return CountResult(artefact=run.artefact, diagnostics=(*idle, *run_diagnostics(run)))
