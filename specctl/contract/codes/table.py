"""The shape of one entry in the diagnostic code table."""

from __future__ import annotations

from typing import Literal

import msgspec


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """One diagnostic code; `specctl explain` and docs/reference/diagnostics.md are made from it.

    Args:
        code: `SD` + family digit + two digits; never reused.
        slug: kebab-case name.
        severity: the usual severity.
        summary: one sentence: what was seen.
        why: why it matters to whoever serves the checkpoint.
        fix: the next step, used as the default `help` line.
        source: paper, format or issue the rule comes from, when it came from outside.
    """

    code: str
    slug: str
    severity: Literal["error", "warning", "info"]
    summary: str
    why: str
    fix: str
    source: str | None = None
