"""Family 5: tensors."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = ()
