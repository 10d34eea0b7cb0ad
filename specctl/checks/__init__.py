"""Pure functions from a normalized checkpoint to diagnostics.

They read no files, except `scan`, `numerics` and `likeness`, which read weights when asked to.

What needs a config key or a file's names to be stated (missing fields, unmapped tensors) is
reported by the readers of `specctl.formats`; here is what follows from the facts themselves.
"""

from __future__ import annotations

from itertools import chain

from specctl.checks.files import check_files
from specctl.checks.geometry import check_geometry
from specctl.checks.quantization import check_inheritance
from specctl.checks.target_fit import check_fit
from specctl.checks.tensors import check_draft_tensors, check_target_tensors
from specctl.checks.vocabulary import check_target_ids, check_vocabulary
from specctl.contract.diagnostics import Diagnostic
from specctl.contract.findings import capped
from specctl.draft import DraftCheckpoint, TargetCheckpoint

__all__ = ["check_draft", "check_files", "check_inheritance", "check_pair", "check_target"]


def check_draft(draft: DraftCheckpoint) -> tuple[Diagnostic, ...]:
    """Return what is wrong with a draft by itself (families 3, 4 and 5)."""
    return capped(chain(check_geometry(draft), check_vocabulary(draft), check_draft_tensors(draft)))


def check_target(target: TargetCheckpoint) -> tuple[Diagnostic, ...]:
    """Return what is wrong with a target by itself (SD207, SD415, SD503, SD508)."""
    return capped(chain(check_target_tensors(target), check_target_ids(target)))


def check_pair(draft: DraftCheckpoint, target: TargetCheckpoint) -> tuple[Diagnostic, ...]:
    """Return what is wrong between a draft and a target; needs both.

    Call it on the draft that `formats.complete_draft` returned, and `check_draft` on that one too.
    """
    return capped(check_fit(draft, target))
