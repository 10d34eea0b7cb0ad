"""Outcomes in the host's buffers are those of the round that was stored, and of no other."""

from __future__ import annotations

import pytest
import torch

from runtime.graphs.outcomes import OutcomeBuffers
from runtime.kernels.outcomes import OutcomeTensors, outcome_store

MOST, COLUMNS = 5, 6


def tensors(*, has_counts: bool, has_chances: bool) -> OutcomeTensors:
    return OutcomeTensors(
        output_BX=torch.zeros((MOST, COLUMNS), dtype=torch.int64),
        num_counted_B=torch.zeros(MOST, dtype=torch.int64) if has_counts else None,
        confidence_BG=torch.zeros((MOST, COLUMNS - 2)) if has_chances else None,
    )


@pytest.mark.parametrize("has_counts", [False, True])
@pytest.mark.parametrize("has_chances", [False, True])
def test_buffers_keep_their_rounds_apart(has_chances: bool, has_counts: bool) -> None:
    source = tensors(has_counts=has_counts, has_chances=has_chances)
    buffers = OutcomeBuffers(source, num_buffers=3)
    sizes = ((5, 6), (2, 3), (1, 2))  # requests, columns
    for buffer, (num_rows, width) in enumerate(sizes):
        for tensor in source.tensors():
            tensor.fill_(10 + buffer)
        buffers.store(buffer, num_rows, width)
    for tensor in source.tensors():
        tensor.fill_(-7)
    for buffer, (num_rows, width) in enumerate(sizes):
        told = 10 + buffer
        assert buffers.read(buffer, num_rows) == [[told] * width] * num_rows
        counted = [told] * num_rows if has_counts else None
        assert buffers.counted(buffer, num_rows) == counted
        chances = [float(told)] * (COLUMNS - 2) if has_chances else []
        assert buffers.confidence(buffer, num_rows) == [chances] * num_rows


def test_rows_beyond_the_round_stay() -> None:
    source, host = (tensors(has_counts=True, has_chances=True) for _ in range(2))
    for tensor in host.tensors():
        tensor.fill_(-9)
    outcome_store(source, host)(2)
    for tensor in host.tensors():
        assert not tensor[:2].any()
        assert bool((tensor[2:] == -9).all())


def test_tensors_of_other_shapes_are_refused() -> None:
    source = tensors(has_counts=True, has_chances=False)
    with pytest.raises(AssertionError, match="no shape"):
        outcome_store(source, tensors(has_counts=False, has_chances=False))
