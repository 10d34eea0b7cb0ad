"""Values that the host knows, moved to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.spec.types import Proposal


def on_device(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """Return host numbers as a device tensor.

    Sync: none. `torch.tensor(..., device="cuda")` waits for the stream; this copy does not. Its
    pageable source is staged before the call returns, so it may be freed at once.
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def pad_proposal(drafts_target: Sequence[Sequence[int]], *, device: torch.device) -> Proposal:
    """Make a proposal of drafts that the host knows, as wide as the longest."""
    width = max((len(drafts) for drafts in drafts_target), default=0)
    rows = [[*drafts, *[0] * (width - len(drafts))] for drafts in drafts_target]
    return Proposal(
        ids_target_BG=on_device(rows, device=device).reshape(len(rows), width),
        num_drafts=tuple(len(drafts) for drafts in drafts_target),
    )
