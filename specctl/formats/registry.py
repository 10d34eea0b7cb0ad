"""All formats, one list: detection, `convert --to`, the reference page and the tests walk it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from specctl.formats import block, eagle, heads, mtp
from specctl.formats.format import Format, Layout
from specctl.formats.target import TARGET

LAYOUTS: tuple[Layout, ...] = (*eagle.LAYOUTS, *block.LAYOUTS, *mtp.LAYOUTS, *heads.LAYOUTS)

DRAFT_FORMATS: tuple[Format, ...] = (
    *eagle.FORMATS,
    *block.FORMATS,
    *mtp.FORMATS,
    *heads.FORMATS,
)
FORMATS: tuple[Format, ...] = (*DRAFT_FORMATS, TARGET)

BY_NAME: Mapping[str, Format] = MappingProxyType({entry.name: entry for entry in FORMATS})
