"""The page that says which drafts `specctl manifest` describes, so that the runtime serves them.

Every row is a fixture put before `specctl manifest` with its target; nothing here is written down.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import yaml

from specctl.contract.diagnostics import DiagnosticError
from specctl.formats.registry import DRAFT_FORMATS
from specctl.ops.emit_manifest import emit_manifest
from specctl.ops.load import load

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "fixtures"
Table = Callable[[tuple[str, ...], Iterable[tuple[str, ...]]], list[str]]


def served_page(notice: str, table: Table) -> str:
    """Return docs/reference/served.md."""
    lines = ["# What is served", "", notice, ""]
    lines += [
        "Drafts that `specctl manifest` writes down are served by the runtime, eagerly and in",
        "rounds on the device. Others are refused with SD716 before a weight is read, by the part",
        "that stands in the way. Each row is a fixture with its target; a format whose drafts are",
        "stored inside a target has no row. Facts that a manifest can state and no layer of the",
        "runtime computes (a rotary scaling, a kind of attention) are refused when the manifest is",
        "loaded: SD811 to SD814.",
        "",
    ]
    columns = ("format", "fixture", "algorithm", "outcome")
    return "\n".join([*lines, *table(columns, _rows())]) + "\n"


def _rows() -> Iterator[tuple[str, ...]]:
    order = {entry.name: index for index, entry in enumerate(DRAFT_FORMATS)}
    rows = list(_outcomes())
    rows.sort(
        key=lambda row: (
            order[row[0].strip("`")],
            row[3] != "served",
            not row[1].endswith("-clean`"),
            row[1],
        )
    )
    seen: set[tuple[str, str]] = set()
    for row in rows:
        key = (row[0], re.sub(r"\d+ tensors", "", row[3]))
        if key not in seen:
            seen.add(key)
            yield row


def _outcomes() -> Iterator[tuple[str, ...]]:
    """Yield every draft fixture that is served or refused for a part of its own (SD716)."""
    expected = yaml.safe_load((FIXTURES / "expected.yaml").read_text("utf-8"))
    for place, entry in expected.items():
        target = entry.get("target")
        if target is None:
            continue
        name = Path(place).name
        try:
            manifest = emit_manifest(
                str(FIXTURES / target), str(FIXTURES / place), num_speculative_tokens=2
            )
        except DiagnosticError as error:
            codes = {found.code for found in error.diagnostics if found.severity == "error"}
            reasons = [found.message for found in error.diagnostics if found.code == "SD716"]
            read = load(str(FIXTURES / place)).draft
            if codes == {"SD716"} and read is not None:
                yield f"`{read.format}`", f"`{name}`", read.algorithm, f"SD716: {reasons[0]}"
            continue
        if manifest.draft is not None:
            stated = manifest.draft
            yield f"`{stated.format}`", f"`{name}`", stated.algorithm, "served"
