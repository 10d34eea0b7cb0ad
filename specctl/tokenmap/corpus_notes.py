"""What is said of a corpus beside its counts: parts that were left out, options that nothing used.

Invariant: a part that is not counted and an option that acts on no file are named, with a number
and the first place.
"""

from __future__ import annotations

from collections.abc import Sequence

from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.tokenmap.readers import REPLACED, UNREADABLE, WITHOUT_ROLES
from specctl.tokenmap.resume import Defects, FinishedRun, defect_lines
from specctl.tokenmap.sources import COLUMN_SUFFIXES, LINE_SUFFIXES, SourceFile

_COUNTED = (REPLACED, WITHOUT_ROLES)


def run_diagnostics(run: FinishedRun) -> tuple[Diagnostic, ...]:
    """Return SD423, SD434, SD805, SD430 and SD427 where they apply."""
    left_out = {kind: entry for kind, entry in run.defects.items() if kind not in _COUNTED}
    closed = unreadable_files(left_out)
    left_out = {kind: entry for kind, entry in left_out.items() if kind not in closed}
    found = []
    if closed:
        found.append(
            diagnose(
                "SD423",
                where=_first(closed),
                message=f"{_num(closed)} parts of the corpus cannot be read and were left out",
                notes=defect_lines(closed),
                severity="warning",
            )
        )
    if left_out:
        found.append(
            diagnose(
                "SD434",
                where=_first(left_out),
                message=f"{_num(left_out)} parts of the corpus are no text as they stand",
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


def refuse_empty(defects: Defects, files: Sequence[SourceFile], roles: Sequence[str]) -> None:
    """Refuse a corpus without a document.

    Raises:
        DiagnosticError: SD423 where files cannot be read, else SD422.
    """
    closed = unreadable_files(defects)
    what = "the file holds" if len(files) == 1 else f"{len(files)} files hold"
    wanted = ", ".join(f"`{role}`" for role in roles)
    nothing = f"no message is of a role {wanted}" if roles else "blank files are no documents"
    raise DiagnosticError(
        diagnose(
            "SD423" if closed else "SD422",
            where=_first(closed) if closed else files[0].path,
            message=f"{what} no text that can be read" if closed else f"{what} no text",
            notes=defect_lines(defects) or (nothing,),
        )
    )


def unreadable_files(defects: Defects) -> Defects:
    """Return the kinds of defect whose cause is the system and not what a file holds."""
    return {kind: entry for kind, entry in defects.items() if kind.startswith(UNREADABLE)}


def _num(defects: Defects) -> int:
    return sum(num for num, _ in defects.values())


def _first(defects: Defects) -> str:
    return min(where for _, where in defects.values())


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
