"""Names the requests that have a row from which no token can be chosen.

Rows are judged on the device (`runtime.kernels.masks`) and told with the round's outcome.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.kernels.masks import NO_FAULT, NOT_A_NUMBER
from runtime.spec.types import RequestView
from specctl.contract.diagnostics import Diagnostic, diagnose


def first_faults(views: Sequence[RequestView], faults: Sequence[Sequence[int]]) -> list[Diagnostic]:
    """Return one diagnostic for each request with a faulty row.

    Args:
        views: the requests.
        faults: per view, the faults of the rows whose outcome is committed.
    """
    problems = []
    for view, row in zip(views, faults, strict=True):
        problem = first_fault(view.request_id, len(view.ids_target), row)
        if problem is not None:
            problems.append(problem)
    return problems


def first_fault(request_id: str, num_tokens: int, faults: Sequence[int]) -> Diagnostic | None:
    """Return SD923 or SD924 for the first faulty row of a request; None without one.

    Args:
        request_id: where it is.
        num_tokens: of the request, so the position that the first row chooses a token for.
        faults: of the rows whose outcome is committed.
    """
    place = next((j for j, fault in enumerate(faults) if fault != NO_FAULT), None)
    if place is None:
        return None
    where, position = f"request={request_id}", num_tokens + place
    if faults[place] == NOT_A_NUMBER:
        return diagnose(
            "SD923",
            where=where,
            message=f"the target's logits for position {position} are not numbers",
            expected="finite logits",
            found="NaN",
        )
    return diagnose(
        "SD924",
        where=where,
        message=f"no token is left to choose at position {position}",
        expected="one allowed token or more",
        found="all of them masked",
    )
