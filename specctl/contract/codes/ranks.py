"""Family 8, SD859: tensor-parallel ranks that run in step."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = (
    Code(
        code="SD859",
        slug="ranks-disagree",
        severity="error",
        summary="Tensor-parallel ranks have committed other ids than the first one.",
        why=(
            "Every rank drafts, verifies and commits for itself from bits that all of them gather. "
            "Ranks that differ once read keys of other tokens from then on, and the text is wrong "
            "on all of them; so a digest of what each committed goes with every step."
        ),
        fix="Report it with the log of every rank: it is a fault of the runtime or of a device",
    ),
)
