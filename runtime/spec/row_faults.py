"""Rows from which no token can be chosen, found on the device and told with the round's outcome.

Legend: M rows, V target ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.spec.types import RequestView
from specctl.contract.diagnostics import Diagnostic, diagnose

NO_FAULT, NOT_A_NUMBER, NOTHING_LEFT = 0, 1, 2


def row_faults(logits_MV: torch.Tensor, processed_MV: torch.Tensor) -> torch.Tensor:
    """Return int64 [M]: a fault of each row or `NO_FAULT`.

    Args:
        logits_MV: the target's.
        processed_MV: after the request's options.

    Graph-safe: yes.
    """
    is_nan_M = logits_MV.isnan().any(dim=1)
    is_empty_M = (processed_MV == -torch.inf).all(dim=1)
    faults_M = torch.where(is_empty_M, NOTHING_LEFT, NO_FAULT)
    return torch.where(is_nan_M, NOT_A_NUMBER, faults_M)


def first_faults(views: Sequence[RequestView], faults: Sequence[Sequence[int]]) -> list[Diagnostic]:
    """Return one diagnostic for each request with a faulty row.

    Args:
        views: the requests.
        faults: per view, the faults of the rows whose outcome is committed.
    """
    problems = []
    for view, row in zip(views, faults, strict=True):
        place = next((j for j, fault in enumerate(row) if fault != NO_FAULT), None)
        if place is None:
            continue
        where, position = f"request={view.request_id}", len(view.ids_target) + place
        if row[place] == NOT_A_NUMBER:
            problems.append(
                diagnose(
                    "SD923",
                    where=where,
                    message=f"the target's logits for position {position} are not numbers",
                    expected="finite logits",
                    found="NaN",
                )
            )
        else:
            problems.append(
                diagnose(
                    "SD924",
                    where=where,
                    message=f"no token is left to choose at position {position}",
                    expected="one allowed token or more",
                    found="all of them masked",
                )
            )
    return problems
