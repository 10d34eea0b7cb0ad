"""Where a fact or tensor is, as the text that a diagnostic's `where` carries."""

from __future__ import annotations

from collections.abc import Mapping

from specctl.contract.manifest import Origin, TensorRef


def tensor_place(ref: TensorRef) -> str:
    """Return `file::key[shape dtype]`."""
    shape = ",".join(str(size) for size in ref.shape)
    return f"{ref.file}::{ref.key}[{f'{shape} {ref.dtype}'.strip()}]"


def fact_place(origins: Mapping[str, Origin], path: str) -> str:
    """Return the place that the fact at a manifest path came from, by longest prefix."""
    parts = path.split(".")
    while parts:
        origin = origins.get(".".join(parts))
        if origin is not None:
            return origin.where
        parts.pop()
    return "config.json"
