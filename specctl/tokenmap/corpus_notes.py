"""What is said of a corpus beside its counts: parts that were left out, options that nothing used.

Invariant: a part that is not counted and an option that acts on no file are named, with a number
and the first place.
"""

from __future__ import annotations

from collections.abc import Sequence

from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.tokenmap.readers import REPLACED, WITHOUT_ROLES
from specctl.tokenmap.resume import Defects, FinishedRun, defect_lines
from specctl.tokenmap.sources import COLUMN_SUFFIXES, LINE_SUFFIXES, SourceFile

_COUNTED = (REPLACED, WITHOUT_ROLES)


def run_diagnostics(run: FinishedRun) -> tuple[Diagnostic, ...]:
    """Return SD434, SD805, SD430 and SD427 where they apply."""
    found = []
    left_out = {kind: entry for kind, entry in run.defects.items() if kind not in _COUNTED}
    if left_out:
        num = sum(num for num, _ in left_out.values())
        found.append(
            diagnose(
                "SD434",
                where=min(where for _, where in left_out.values()),
                message=f"{num} parts of the corpus are no text as they stand",
                notes=defect_lines(left_out),
            )
        )
    if WITHOUT_ROLES in run.defects:
        num, where = run.defects[WITHOUT_ROLES]
        found.append(
            diagnose(
                "SD805",
                where=where,
                message=f"{num} documents hold no chat messages: roles and the chat template do "
                "not act on them",
                expected="chat messages",
                found="texts, counted as they stand",
                help="Name the files that hold chats, or leave the option out",
            )
        )
    if REPLACED in run.defects:
        num, where = run.defects[REPLACED]
        found.append(
            diagnose("SD430", where=where, message=f"{num} texts hold half surrogate pairs")
        )
    sides = (run.artefact.counted, run.artefact.held_out)
    if not all(side.num_documents for side in sides):
        found.append(
            diagnose("SD427", where="CORPUS", message="no document is on the held-out side")
        )
    return tuple(found)


def left_out_arrays(named: Sequence[SourceFile], files: Sequence[SourceFile]) -> Defects:
    """Return what `without_arrays` left out, as a kind of defect."""
    kept = {file.path for file in files}
    gone = [file.path for file in named if file.path not in kept]
    return {"token ids beside texts": (len(gone), gone[0])} if gone else {}


def idle_options(
    files: Sequence[SourceFile],
    *,
    fields: Sequence[str],
    language: str | None,
    ids: str | None,
) -> tuple[Diagnostic, ...]:
    """Return SD805 for each option that acts on a kind of file which the corpus lacks.

    Args:
        files: of the corpus.
        fields: keys of jsonl lines or rows.
        language: key that names a document's language.
        ids: element type of `.bin` files.
    """
    kinds = {file.kind for file in files}
    has_rows = bool(kinds & (LINE_SUFFIXES | COLUMN_SUFFIXES))
    idle = []
    if fields and not has_rows:
        idle.append(("--field", "jsonl, parquet or arrow"))
    if language is not None and not has_rows:
        idle.append(("--language-field", "jsonl, parquet or arrow"))
    if ids is not None and ".bin" not in kinds:
        idle.append(("--id-type", "`.bin`"))
    return tuple(
        diagnose(
            "SD805",
            where=option,
            message=f"`{option}` acts on no file of the corpus",
            expected=f"a {form} file",
            found=", ".join(sorted(kinds)) or "no suffix",
        )
        for option, form in idle
    )
