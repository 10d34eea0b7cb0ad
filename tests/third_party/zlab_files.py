"""The tests' side of `zlab_worker`: its inputs, and the tensors of a directory as floats."""

from __future__ import annotations

from pathlib import Path

import torch

from specctl.checkpoint import open_checkpoint

TOKENS, ANCHOR, SEED = 40, 13, 7


def floats(place: Path) -> dict[str, torch.Tensor]:
    """Return the BF16 tensors of a checkpoint, by key, in float32."""
    opened = open_checkpoint(place)
    found = {}
    for key, entry in opened.tensors.items():
        if entry.dtype == "BF16":
            values = torch.frombuffer(bytearray(opened.read_bytes(key)), dtype=torch.bfloat16)
            found[key] = values.view(entry.shape).float()
    return found
