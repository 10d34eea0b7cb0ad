"""Ask every rule of the table about one draft."""

from __future__ import annotations

from specctl.draft import DraftCheckpoint, TargetCheckpoint
from specctl.verdicts.rule import ENGINES, EXAMINED, NEWEST, EngineVerdict, Facts, Outcome, Verdict
from specctl.verdicts.table import RULES

_WORST_FIRST: tuple[Outcome, ...] = ("refused", "wrong", "loads")


def judge(
    draft: DraftCheckpoint, target: TargetCheckpoint | None = None
) -> tuple[EngineVerdict, ...]:
    """Return one verdict for each engine.

    Args:
        draft: as read; completed by the target when there is one.
        target: the target it is served with, None when unknown.
    """
    facts = Facts(draft=draft, target=target)
    met = [rule for rule in RULES if rule.applies(facts)]
    verdicts = []
    for engine, read in ENGINES.items():
        rows = tuple(
            rule
            for outcome in _WORST_FIRST
            for rule in met
            if rule.engine == engine and rule.outcome == outcome
        )
        current = [row.outcome for row in rows if row.is_current]
        is_examined = draft.algorithm in EXAMINED[engine]
        unmet: Verdict = "loads" if is_examined else "unknown"
        verdicts.append(
            EngineVerdict(
                engine=engine,
                outcome=next((o for o in _WORST_FIRST if o in current), unmet),
                version=NEWEST[engine],
                checked_on=read,
                rows=rows,
            )
        )
    return tuple(verdicts)
