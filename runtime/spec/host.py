"""Drafts that the host knows, as a proposal."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.batch import on_device
from runtime.spec.types import Proposal


def pad_proposal(drafts_target: Sequence[Sequence[int]], *, device: torch.device) -> Proposal:
    """Make a proposal of drafts that the host knows, as wide as the longest."""
    width = max((len(drafts) for drafts in drafts_target), default=0)
    rows = [[*drafts, *[0] * (width - len(drafts))] for drafts in drafts_target]
    return Proposal(
        ids_target_BG=on_device(rows, device=device).reshape(len(rows), width),
        num_drafts=tuple(len(drafts) for drafts in drafts_target),
    )
