"""Family 8: runtime start-up."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = ()
