"""Pure functions from a normalized checkpoint to diagnostics.

They read no files, except `scan`, `numerics` and `likeness`, which read weights when asked to.

What needs a config key or a file's names to be stated (missing fields, unmapped tensors) is
reported by the readers of `specctl.formats`; here is what follows from the facts themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from specctl.checks.files import check_files
from specctl.checks.geometry import check_geometry
from specctl.checks.quantization import check_inheritance
from specctl.checks.target_fit import check_fit
from specctl.checks.tensors import check_draft_tensors, check_target_tensors
from specctl.checks.vocabulary import check_vocabulary
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.findings import capped
from specctl.draft import DraftCheckpoint, TargetCheckpoint

__all__ = ["check_draft", "check_files", "check_inheritance", "check_pair", "check_target"]


def check_draft(draft: DraftCheckpoint) -> tuple[Diagnostic, ...]:
    """Return what is wrong with a draft by itself (families 3, 4 and 5)."""
    return capped(chain(check_geometry(draft), check_vocabulary(draft), check_draft_tensors(draft)))


def check_target(target: TargetCheckpoint) -> tuple[Diagnostic, ...]:
    """Return what is wrong with a target by itself (SD207, SD415, SD503, SD508)."""
    return capped(chain(check_target_tensors(target), _check_ids(target)))


def _check_ids(target: TargetCheckpoint) -> Iterator[Diagnostic]:
    entries, rows = target.tokenizer_size, target.vocab_size
    if entries is not None and rows is not None and entries > rows:
        yield diagnose(
            "SD415",
            where="tokenizer.json",
            message=f"the tokenizer has {entries} entries and the embedding {rows} rows",
            expected=f"at most {rows}",
            found=entries,
        )
    for token in target.eos_token_ids:
        if rows is not None and not 0 <= token < rows:
            yield diagnose(
                "SD207",
                where="config.json#/eos_token_id",
                message=f"end id {token} is no row of the embedding, so it can never end an answer",
                expected=f"0 to {rows - 1}",
                found=token,
                severity="warning",
            )


def check_pair(draft: DraftCheckpoint, target: TargetCheckpoint) -> tuple[Diagnostic, ...]:
    """Return what is wrong between a draft and a target; needs both.

    Call it on the draft that `formats.complete_draft` returned, and `check_draft` on that one too.
    """
    return capped(check_fit(draft, target))
