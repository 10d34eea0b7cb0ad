"""Where a fact comes from, as the text that a diagnostic's `where` carries."""

from __future__ import annotations

from collections.abc import Mapping

from specctl.contract.file_names import CONFIG
from specctl.contract.manifest import Origin, find_origin


def fact_place(origins: Mapping[str, Origin], path: str) -> str:
    """Return the place that the fact at a manifest path came from, by longest prefix."""
    origin = find_origin(origins, path)
    return CONFIG if origin is None else origin.where
