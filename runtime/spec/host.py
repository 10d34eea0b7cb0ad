"""Proposals whose drafts the host knows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.spec.types import Proposal


def pad_proposal(drafts_target: Sequence[Sequence[int]], *, device: torch.device) -> Proposal:
    """Make a proposal of drafts that the host knows, as wide as the longest."""
    width = max((len(drafts) for drafts in drafts_target), default=0)
    rows = [[*drafts, *[0] * (width - len(drafts))] for drafts in drafts_target]
    ids_target_BG = torch.tensor(rows, dtype=torch.int64, device=device)
    return Proposal(
        ids_target_BG=ids_target_BG.reshape(len(rows), width),
        num_drafts=tuple(len(drafts) for drafts in drafts_target),
    )
