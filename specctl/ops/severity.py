"""How serious a finding is to this run: the one table of `--strict`, `--error` and `--ignore`.

Invariants: a code is named by its number or its short name; a name that is no code is wrong usage
and never silently without effect. Ignored findings are dropped before anything is counted, so the
exit status, every format and `--expect` see the same list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from specctl.contract.diagnostics import Diagnostic, Severity
from specctl.ops.explain import find_code, unknown_code

STRICT: Mapping[str, Severity] = MappingProxyType({"SD211": "error"})
"""What `--strict` makes of a code: an unread field may change the forward pass."""


class WrongCodeError(ValueError):
    """A list of codes that cannot be followed; the text is one line for the user.

    Attributes:
        option: `--error` or `--ignore`.
    """

    def __init__(self, option: str, text: str) -> None:
        """Hold the option and what is wrong with its value."""
        self.option = option
        super().__init__(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeverityRules:
    """What replaces the usual severity of a code.

    Args:
        replaced: code -> severity of this run.
        ignored: codes whose findings are dropped.
    """

    replaced: Mapping[str, Severity]
    ignored: frozenset[str]

    def apply(self, diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
        """Return the diagnostics that are left, each with its severity of this run."""
        return tuple(
            msgspec.structs.replace(item, severity=self.replaced[item.code])
            if item.code in self.replaced
            else item
            for item in diagnostics
            if item.code not in self.ignored
        )


USUAL = SeverityRules(replaced=MappingProxyType({}), ignored=frozenset())
"""Every code as its table says."""


def severity_rules(
    *, is_strict: bool = False, error: Sequence[str] = (), ignore: Sequence[str] = ()
) -> SeverityRules:
    """Return the rules that the options of a command ask for.

    Args:
        is_strict: apply `STRICT`.
        error: codes whose findings become errors; each text may list several, with commas.
        ignore: codes whose findings are dropped, written likewise.

    Raises:
        WrongCodeError: a name is no code, or a code is in both lists.
    """
    raised = _codes("--error", error)
    ignored = _codes("--ignore", ignore)
    both = sorted(raised & ignored)
    if both:
        raise WrongCodeError("--ignore", f"`{both[0]}` is in `--error` as well")
    replaced: dict[str, Severity] = dict(STRICT) if is_strict else {}
    for code in raised:
        replaced[code] = "error"
    return SeverityRules(replaced=MappingProxyType(replaced), ignored=frozenset(ignored))


def _codes(option: str, texts: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for name in (part.strip() for text in texts for part in text.split(",")):
        entry = find_code(name) if name else None
        if entry is None:
            raise WrongCodeError(option, unknown_code(name))
        found.add(entry.code)
    return found
