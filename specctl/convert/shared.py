"""Tell an embedding or head that a dialect has no place for from a copy of the target's.

Invariants: a copy is no loss, because every engine takes the target's in its place; it is compared
byte by byte, in pieces. What cannot be compared stays a loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from specctl.checkpoint import Checkpoint
from specctl.contract.diagnostics import Diagnostic
from specctl.contract.manifest import TensorRef
from specctl.draft import DraftCheckpoint, TargetCheckpoint
from specctl.formats.written import Origin, loss_of


def settle_shared(
    diagnostics: Iterable[Diagnostic],
    draft: DraftCheckpoint,
    target: TargetCheckpoint | None,
    checkpoints: Mapping[Origin, Checkpoint],
) -> Iterator[Diagnostic]:
    """Yield the findings; a left-out embedding or head equal to the target's becomes an info.

    Args:
        diagnostics: of a writer.
        draft: its tensors by role.
        target: None when there is nothing to compare with.
        checkpoints: the sources by origin.
    """
    theirs = {} if target is None else {"embedding": target.embedding, "head": target.head}
    for finding in diagnostics:
        role = loss_of(finding) or ""
        ours, other = draft.tensors.get(role), theirs.get(role)
        if ours is None or other is None or not is_copy(ours, other, checkpoints):
            yield finding
        else:
            yield msgspec.structs.replace(
                finding,
                severity="info",
                message=f"`{ours.key}` equals the target's `{other.key}` and is left out",
            )


def is_copy(ours: TensorRef, other: TensorRef, checkpoints: Mapping[Origin, Checkpoint]) -> bool:
    """Tell whether the draft's matrix is the target's; the target's may have rows after it."""
    if (ours.dtype, ours.shape[1:]) != (other.dtype, other.shape[1:]):
        return False
    size = ours.end - ours.begin
    if size > other.end - other.begin:
        return False
    pieces = zip(
        checkpoints["draft"].iter_range(ours.file, ours.begin, ours.end),
        checkpoints["target"].iter_range(other.file, other.begin, other.begin + size),
        strict=True,
    )
    return all(left == right for left, right in pieces)
