"""The answers in a benchmark's records, each prompt's once, and the acceptance they measured.

Reads `records.jsonl` of `specctl bench --output`, and the JSON of earlier reports, whose records
are in `requests`. Nothing of the runtime is imported: only the keys used here are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.tokenmap.cost import accepted_drafts

TARGET_ONLY = "target-only"
_PLACE = ("point", "prompt", "turn")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredDrafts:
    """What a benchmark says about its draft.

    Args:
        num_speculative_tokens: drafts of a round.
        acceptance: at every position alike, the one that gives the measured accept length.
        accept_length: as measured.
    """

    num_speculative_tokens: int
    acceptance: float
    accept_length: float


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


def measured_drafts(records: Sequence[Any]) -> MeasuredDrafts | None:
    """Return what the drafted requests measured, None without one.

    Drafts of a round are the most that any request proposed on average, rounded up.
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
    return MeasuredDrafts(num_speculative_tokens=number, acceptance=low, accept_length=1 + wanted)
