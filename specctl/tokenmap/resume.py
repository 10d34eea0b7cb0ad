"""Use again what an earlier run of the same corpus left: a finished count file, or its parts.

Invariant: nothing is used but what the same files, tokenizer and options gave; anything else is
refused, so a count file is never overwritten by another run's.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from specctl.checkpoint.writing import write_text_atomic
from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.tokenmap.counts import CountArtefact, read_counts, write_counts

_RUN_FILE = "run.json"

Defects = dict[str, tuple[int, str]]
"""Kind of defect -> how many, and the first place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """A count file and what its run left out.

    Args:
        artefact: the counts.
        defects: parts of the corpus that are no text.
    """

    artefact: CountArtefact
    defects: Defects


class _Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a run file holds.

    Args:
        run: digest of files, tokenizer and options.
        defects: of the finished run; empty beside parts, which have their own.
    """

    run: str
    defects: Defects


def finished_run(counts: Path | None, run_digest: str) -> FinishedRun | None:
    """Return an earlier run of the same corpus, None when there is no count file.

    Raises:
        DiagnosticError: SD433 for the count file of another run, SD432 and family 1 codes for a
            damaged one.
    """
    if counts is None or not counts.exists():
        return None
    artefact = read_counts(counts)
    run = _read_run(_run_file(counts), run_digest, where=counts)
    return FinishedRun(artefact=artefact, defects=run.defects)


def keep_run(
    counts: Path | None, run_digest: str, artefact: CountArtefact, defects: Defects
) -> None:
    """Write the count file, and beside it which run it is of."""
    if counts is not None:
        write_counts(counts, artefact)
        _write_run(_run_file(counts), run_digest, defects)


@contextmanager
def parts_directory(counts: Path | None, run_digest: str) -> Iterator[Path]:
    """Yield where parts are kept: beside the count file, or for this run only.

    Raises:
        DiagnosticError: SD433 for the parts of another run.
    """
    if counts is None:
        with tempfile.TemporaryDirectory(prefix="specctl-counts-") as name:
            yield Path(name)
        return
    directory = counts.with_name(f"{counts.name}.parts")
    directory.mkdir(parents=True, exist_ok=True)
    run = directory / _RUN_FILE
    if run.exists():
        _read_run(run, run_digest, where=directory)
    else:
        _write_run(run, run_digest, {})
    yield directory
    shutil.rmtree(directory)


def defect_lines(defects: Defects) -> tuple[str, ...]:
    """Return one line for each kind of defect."""
    ordered = sorted(defects.items())
    return tuple(f"{num} x {kind}, first at {where}" for kind, (num, where) in ordered)


def _run_file(counts: Path) -> Path:
    """Return the file that says which run a count file is of: names, sizes and times of change."""
    return counts.with_name(f"{counts.name}.run")


def _write_run(path: Path, run_digest: str, defects: Defects) -> None:
    facts = msgspec.json.encode(_Run(run=run_digest, defects=dict(sorted(defects.items()))))
    write_text_atomic(path, facts.decode("utf-8"))


def _read_run(path: Path, run_digest: str, *, where: Path) -> _Run:
    """Return what a run file says; SD433 when it is of another run."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=_Run)
        found = "a different run"
    except (OSError, msgspec.DecodeError):
        run, found = None, f"no `{path.name}` that says which run it is of"
    if run is None or run.run != run_digest:
        raise DiagnosticError(
            diagnose(
                "SD433",
                where=str(where),
                message="holds counts of another corpus, tokenizer or other options",
                expected="the same files, tokenizer and options as this time",
                found=found,
            )
        )
    return run
