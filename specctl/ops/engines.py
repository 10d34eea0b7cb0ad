"""What other engines do with a draft, as a section of a report and as findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import get_args

from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.draft import DraftCheckpoint, TargetCheckpoint
from specctl.ops.report import EngineReport, EngineRow
from specctl.verdicts import Engine, judge

ENGINE_NAMES: tuple[str, ...] = get_args(Engine)


def engine_reports(
    draft: DraftCheckpoint, target: TargetCheckpoint | None
) -> tuple[EngineReport, ...]:
    """Return the verdicts on a draft."""
    return tuple(
        EngineReport(
            engine=verdict.engine,
            outcome=verdict.outcome,
            version=verdict.version,
            checked_on=verdict.checked_on,
            rows=tuple(
                EngineRow(
                    name=row.name,
                    outcome=row.outcome,
                    versions=row.versions,
                    is_current=row.is_current,
                    reason=row.reason,
                    source=row.source,
                )
                for row in verdict.rows
            ),
        )
        for verdict in judge(draft, target)
    )


def engine_findings(
    draft: DraftCheckpoint, target: TargetCheckpoint | None, engines: Iterable[str]
) -> Iterator[Diagnostic]:
    """Yield SD212 and SD213 for the rows that hold in the newest release of the engines named."""
    wanted = set(engines)
    for report in engine_reports(draft, target):
        if report.engine not in wanted:
            continue
        for row in report.rows:
            if row.is_current and row.outcome != "loads":
                yield diagnose(
                    "SD212" if row.outcome == "refused" else "SD213",
                    where="config.json#",
                    message=f"{report.engine} {report.version}: {row.reason}",
                    expected="a draft that this engine runs as it was trained",
                    found=row.name,
                    notes=(f"read in {row.versions}: {row.source}",),
                )
