"""On-disk dialects of targets and drafts: detect one, read it into the normalized form.

Invariants: `detect` is total and unique and looks at config and tensors only. A reader reports
every defect in `.diagnostics` and raises only when there is no format to read by. Name tables are
two-way data (`names.NameTable`), one per dialect; `registry.FORMATS` lists every format once.
"""

from __future__ import annotations

from specctl.checkpoint import Checkpoint
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.draft import Detection, DraftCheckpoint, TargetCheckpoint
from specctl.formats.detect import detect, mark_place
from specctl.formats.given import complete_draft, with_given
from specctl.formats.registry import BY_NAME

__all__ = ["complete_draft", "detect", "read_draft", "read_target", "with_given"]


def read_draft(checkpoint: Checkpoint, detection: Detection | None = None) -> DraftCheckpoint:
    """Return the normalized draft; of a target, the one bundled with it.

    Args:
        checkpoint: the opened files.
        detection: what `detect` said of it, None to ask again.

    Raises:
        DiagnosticError: SD201, SD202 or SD205 when no draft format reads it, or it is a target
            without a draft.
    """
    detection = detect(checkpoint) if detection is None else detection
    if detection.format is None:
        raise DiagnosticError(detection.diagnostics)
    name = detection.format if detection.role == "draft" else detection.bundled
    reader = None if name is None else BY_NAME[name].read
    if reader is None:
        raise DiagnosticError(_wrong_role("a draft", detection.evidence, checkpoint))
    return reader(checkpoint)


def read_target(checkpoint: Checkpoint, detection: Detection | None = None) -> TargetCheckpoint:
    """Return the normalized target.

    Args:
        checkpoint: the opened files.
        detection: what `detect` said of it, None to ask again.

    Raises:
        DiagnosticError: SD201, SD202 or SD205 when no format reads it, or it is a draft.
    """
    detection = detect(checkpoint) if detection is None else detection
    if detection.format is None:
        raise DiagnosticError(detection.diagnostics)
    if detection.role != "target":
        raise DiagnosticError(_wrong_role("a target", detection.evidence, checkpoint))
    from specctl.formats import huggingface  # a draft alone needs none of it

    return huggingface.read(checkpoint, detection.bundled)


def _wrong_role(wanted: str, evidence: tuple[str, ...], checkpoint: Checkpoint) -> Diagnostic:
    other = "a target" if wanted == "a draft" else "a draft"
    return diagnose(
        "SD201",
        where=mark_place(evidence[0], checkpoint),
        message=f"this is {other}, and {wanted} is needed here",
        expected=wanted,
        found=f"{other}: {', '.join(evidence)}",
        help="Swap the two sources, or pass the right directory",
    )
