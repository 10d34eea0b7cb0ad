"""The diagnostic code table: one list, split by family, from which pages and help are made.

Families: 1 container and files, 2 format detection, 3 geometry, 4 vocabulary, 5 tensors,
6 conversion, 7 manifest, 8 runtime start-up, 9 runtime request.
"""

from __future__ import annotations

from types import MappingProxyType

from specctl.contract.codes import (
    container,
    formats,
    geometry,
    manifest,
    request,
    startup,
    tensors,
    vocabulary,
)
from specctl.contract.codes.table import Code

_FAMILIES = (container, formats, geometry, vocabulary, tensors, manifest, startup, request)


def _build() -> dict[str, Code]:
    table: dict[str, Code] = {}
    for family in _FAMILIES:
        for entry in family.CODES:
            if entry.code in table:
                raise ValueError(f"{entry.code} is defined twice")
            table[entry.code] = entry
    return dict(sorted(table.items()))


CODES: MappingProxyType[str, Code] = MappingProxyType(_build())

__all__ = ["CODES", "Code"]
