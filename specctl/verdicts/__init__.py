"""What other engines do with a draft: load it, refuse it, or run it wrong without a word.

Invariants: every statement is a row of a table with its source and the versions whose sources were
read; rows are data, `judge` only asks them. No row means: nothing is known against it.
"""

from __future__ import annotations

from specctl.verdicts.judge import judge
from specctl.verdicts.rule import ENGINES, Engine, EngineVerdict, Outcome, Rule
from specctl.verdicts.table import RULES

__all__ = ["ENGINES", "RULES", "Engine", "EngineVerdict", "Outcome", "Rule", "judge"]
