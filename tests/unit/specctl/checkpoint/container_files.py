"""Builders of checkpoint files; bytes are written by hand, not by our writer."""

from __future__ import annotations

import json

from specctl.checkpoint import Checkpoint
from specctl.contract.diagnostics import Diagnostic


def safetensors_bytes(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object, shape: object, begin: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def table(*names: str) -> tuple[dict[str, object], bytes]:
    """Return a header and data with one F32[2] tensor for each name."""
    header: dict[str, object] = {
        name: entry("F32", [2], 8 * i, 8 * i + 8) for i, name in enumerate(names)
    }
    return header, bytes(range(8)) * len(names)


def codes(checkpoint: Checkpoint) -> list[str]:
    return [d.code for d in checkpoint.diagnostics]


def only(checkpoint: Checkpoint) -> Diagnostic:
    assert len(checkpoint.diagnostics) == 1, [d.oneline() for d in checkpoint.diagnostics]
    return checkpoint.diagnostics[0]
