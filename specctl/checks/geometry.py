"""Checks of a draft's captured layers and block, by the draft's own facts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from specctl.checks.places import fact_place
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.draft import DraftCheckpoint


def check_geometry(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    """Yield SD304, SD308 and SD314."""
    yield from _check_aux_order(draft)
    yield from _check_mask_token(draft)


def _check_aux_order(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    declared = draft.declared_aux_ids
    ids = declared if draft.aux_layer_ids is None else draft.aux_layer_ids
    if ids is None:
        return
    where = fact_place(draft.origins, "draft.aux_layer_ids")
    shown = list(ids if declared is None else declared)
    if any(later <= earlier for earlier, later in pairwise(ids)):
        yield diagnose(
            "SD308",
            where=where,
            message=f"captured-layer ids {shown} repeat or are not in ascending order",
            expected=sorted(set(shown)),
            found=shown,
        )
    below = [shown[place] for place, layer in enumerate(ids) if layer < -1]
    if below:
        lowest = 0 if draft.aux_numbering == "boundary" else -1
        yield diagnose(
            "SD304",
            where=where,
            message=f"captured-layer id {below[0]} lies before the embedding output",
            expected=f"{draft.aux_numbering or 'output'} ids from {lowest}",
            found=below[0],
        )


def _check_mask_token(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    token, size = draft.mask_token_id, draft.target_vocab_size
    if "mask_file" in draft.details:
        return  # the vector has no row of the embedding
    if token is not None and size is not None and token >= size:
        yield diagnose(
            "SD314",
            where=fact_place(draft.origins, "draft.mask_token_id"),
            message=f"`mask_token_id` {token} lies outside a vocabulary of {size}",
            expected=f"below {size}",
            found=token,
        )
