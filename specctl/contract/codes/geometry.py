"""Family 3: geometry."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = ()
