"""The answers in a benchmark's records, each prompt's once, and the acceptance they measured.

Reads `records.jsonl` of `specctl bench --output` and `settings.json` beside it, and the JSON of
earlier reports, whose records are in `requests`. Nothing of the runtime is imported: only the keys
used here are looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.tokenmap.cost import accepted_drafts

TARGET_ONLY = "target-only"
SETTINGS_FILE = "settings.json"
REDUCED_KEY = "draft_vocab_size"
_PLACE = ("point", "prompt", "turn")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducedHead:
    """The head of a draft that had a token map when it was measured.

    Args:
        draft_vocab_size: its rows.
        where: place that says so.
    """

    draft_vocab_size: int
    where: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredDrafts:
    """What a benchmark says about its draft.

    Args:
        num_speculative_tokens: drafts of a round.
        acceptance: at every position alike, the one that gives the measured accept length.
        accept_length: as measured.
        reduced: head that was measured; None: the full one, or the benchmark does not say.
    """

    num_speculative_tokens: int
    acceptance: float
    accept_length: float
    reduced: ReducedHead | None = None


def is_record(item: object) -> bool:
    """Tell whether a JSON value is a line of `records.jsonl`."""
    return isinstance(item, dict) and "kind" in item and ("arm" in item or item["kind"] == "copy")


def answers_once(records: Iterable[Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return place and record of each prompt's first answer by the target alone.

    Without a run of the target alone it is the first arm there is: all arms write the same.
    """
    requests = [
        (place, record)
        for place, record in enumerate(records)
        if isinstance(record, dict) and record.get("kind", "request") == "request"
    ]
    arms = [record.get("arm") for _, record in requests]
    arm = TARGET_ONLY if TARGET_ONLY in arms else next(iter(arms), None)
    first: dict[tuple[Any, ...], tuple[int, Mapping[str, Any]]] = {}
    for place, record in requests:
        if record.get("arm") == arm:
            first.setdefault(tuple(record.get(key) for key in _PLACE), (place, record))
    return list(first.values())


def reduced_head(directory: Path) -> ReducedHead | None:
    """Return the reduced head that a benchmark measured; None without one or without settings.

    Args:
        directory: of the records.

    Raises:
        DiagnosticError: SD423 for settings that cannot be read.
    """
    path = directory / SETTINGS_FILE
    try:
        settings = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(str(path), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(str(path), f"not JSON: {str(error)[:100]}") from error
    if not isinstance(settings, dict):
        raise _unreadable(str(path), f"no object: {type(settings).__name__}")
    if REDUCED_KEY not in settings:
        return None
    where, rows = f"{path}#/{REDUCED_KEY}", settings[REDUCED_KEY]
    if type(rows) is not int or rows < 1:
        raise _unreadable(where, f"no number of rows: {rows!r}")
    return ReducedHead(draft_vocab_size=rows, where=where)


def _unreadable(where: str, message: str) -> DiagnosticError:
    help_text = "Give the directory as `specctl bench --output` wrote it"
    return DiagnosticError(diagnose("SD423", where=where, message=message, help=help_text))


def measured_drafts(
    records: Sequence[Any], reduced: ReducedHead | None = None
) -> MeasuredDrafts | None:
    """Return what the drafted requests measured, None without one.

    Drafts of a round are the most that any request proposed on average, rounded up.

    Args:
        records: of all arms.
        reduced: head that they were drafted with, None for the full one.
    """
    rounds = accepted = number = 0
    for record in records:
        if not isinstance(record, dict) or record.get("arm") == TARGET_ONLY:
            continue
        counts = [record.get(key) for key in ("rounds", "proposed_drafts", "accepted_drafts")]
        known = [count for count in counts if type(count) is int]
        if len(known) == len(counts) and known[0]:
            rounds += known[0]
            accepted += known[2]
            number = max(number, -(-known[1] // known[0]))
    if not rounds or number < 1 or not 0 <= accepted <= number * rounds:
        return None
    wanted = accepted / rounds
    low, high = 0.0, 1.0
    for _ in range(60):  # accepted_drafts rises with acceptance
        middle = (low + high) / 2
        low, high = (middle, high) if accepted_drafts(middle, number) < wanted else (low, middle)
    return MeasuredDrafts(
        num_speculative_tokens=number,
        acceptance=low,
        accept_length=1 + wanted,
        reduced=reduced,
    )
