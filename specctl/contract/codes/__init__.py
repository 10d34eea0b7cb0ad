"""The diagnostic code table: one list, split by family, from which pages and help are made."""

from __future__ import annotations

from types import MappingProxyType

from specctl.contract.codes import (
    container,
    conversion,
    disagg,
    fit,
    formats,
    geometry,
    manifest,
    numerics,
    parallel,
    quantization,
    ranks,
    request,
    sources,
    startup,
    tensors,
    vocabulary,
)
from specctl.contract.codes.table import Code

FAMILIES: MappingProxyType[str, str] = MappingProxyType(
    {
        "1": "Container and files",
        "2": "Format detection",
        "3": "Geometry",
        "4": "Vocabulary",
        "5": "Tensors",
        "6": "Conversion",
        "7": "Manifest",
        "8": "Runtime start-up",
        "9": "Runtime request",
    }
)
"""First digit of a code -> title."""

_MODULES = (
    container,
    sources,
    formats,
    geometry,
    vocabulary,
    fit,
    tensors,
    quantization,
    numerics,
    conversion,
    manifest,
    startup,
    parallel,
    ranks,
    disagg,
    request,
)


def _build() -> dict[str, Code]:
    table: dict[str, Code] = {}
    for module in _MODULES:
        for entry in module.CODES:
            if entry.code in table:
                raise ValueError(f"{entry.code} is defined twice")
            table[entry.code] = entry
    return dict(sorted(table.items()))


CODES: MappingProxyType[str, Code] = MappingProxyType(_build())

__all__ = ["CODES", "FAMILIES", "Code"]
