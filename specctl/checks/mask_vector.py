"""Hold a mask vector's file against the draft that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator

from specctl.checkpoint.mask_vector import MaskVector
from specctl.checks.places import fact_place
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.draft import DraftCheckpoint


def check_mask_vector(vector: MaskVector, draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    """Yield SD322 for a vector of another width than the draft's, or of another token.

    Args:
        vector: what the file states.
        draft: whose slots are fed the vector.
    """
    width, token = draft.hidden_size, draft.mask_token_id
    if width is not None and vector.size != width:
        yield diagnose(
            "SD322",
            where=vector.where,
            message=f"the mask vector has {vector.size} elements, the draft a hidden size of "
            f"{width}",
            expected=width,
            found=vector.size,
        )
    if token is not None and vector.token_id is not None and vector.token_id != token:
        place = fact_place(draft.origins, "draft.mask_token_id")
        yield diagnose(
            "SD322",
            where=vector.where,
            message=f"the vector is that of id {vector.token_id}, and the mask token is id {token} "
            f"({place})",
            expected=token,
            found=vector.token_id,
        )
