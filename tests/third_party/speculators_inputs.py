"""The inputs that `speculators_worker` traces an EAGLE-3 draft with, made again on this side."""

from __future__ import annotations

import torch

SEQUENCE = 128


def draft_inputs(vocab_size: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [SEQUENCE] and captured states [SEQUENCE, width] of the worker's seed."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, vocab_size, (1, SEQUENCE), generator=generator)
    hidden = torch.randn(1, SEQUENCE, width, generator=generator)
    return ids[0], hidden[0]
