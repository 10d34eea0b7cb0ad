"""Family 9: runtime request."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = ()
