"""Prompt lookup under the interpreter equals its twin; see `interpreted.py`."""

from __future__ import annotations

import os

import pytest
import torch

from runtime.kernels.cuda import ngram
from runtime.kernels.ngram import append_history_twin, find_drafts_twin

assert os.environ.get("TRITON_INTERPRET") == "1", "start through test_interpreter.py"

NUM_SLOTS = 6
PADDING = NUM_SLOTS - 1


def history(num_positions: int, *, num_ids: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_positions + num_ids)
    shape = (NUM_SLOTS, num_positions)
    return torch.randint(0, num_ids, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_ids", [2, 7])
@pytest.mark.parametrize(("num_drafts", "max_ngram"), [(1, 1), (3, 4), (8, 2), (4, 9)])
def test_drafts_are_found(
    monkeypatch: pytest.MonkeyPatch,
    num_drafts: int,
    max_ngram: int,
    num_ids: int,
    dtype: torch.dtype,
) -> None:
    """Over one block of positions and over many, whatever stands beyond the newest token."""
    rows = history(90, num_ids=num_ids, dtype=dtype)
    slots = torch.tensor([3, 0, 4, 1, PADDING, PADDING])
    lengths = torch.tensor([80, 31, 0, 5, 0, 0])
    for block in (16, 128):
        monkeypatch.setattr(ngram, "FIND_BLOCK", block)
        outcomes = []
        for find in (ngram.launch_find_drafts, find_drafts_twin):
            found = torch.full((NUM_SLOTS,), -5)
            drafts = find(
                rows, slots, lengths, found_S=found, num_drafts=num_drafts, max_ngram=max_ngram
            )
            outcomes.append((drafts, found))
        assert outcomes[0][0].dtype == torch.int64
        assert torch.equal(outcomes[0][0], outcomes[1][0])
        assert torch.equal(outcomes[0][1], outcomes[1][1])
        assert outcomes[0][1][2] == -5, "a slot without a request in the round stays"
        assert outcomes[0][1].max() > 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [1, 3, 9])
def test_tokens_are_appended(width: int, dtype: torch.dtype) -> None:
    slots = torch.tensor([2, 0, PADDING, PADDING])
    lengths = torch.tensor([4, 17, 0, 0])  # the second row ends beyond the last position
    wide = torch.randint(0, 99, (4, width + 2), generator=torch.Generator().manual_seed(width))
    wide[3] = wide[2]  # which of two padding requests writes last is open
    states = []
    for append in (ngram.launch_append_history, append_history_twin):
        rows = history(20, num_ids=50, dtype=dtype)
        append(rows, slots, lengths, wide[:, 1 : width + 1])
        states.append(rows)
    assert torch.equal(*states)
    assert states[0][2, 5 : 5 + width].tolist() == wide[0, 1 : width + 1].tolist()
