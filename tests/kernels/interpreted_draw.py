"""Draws of a round under the interpreter equal their twin; see `interpreted.py`."""

from __future__ import annotations

import os

import pytest
import torch

from runtime.graphs.slot_sampling import GREEDY, SamplingState, SlotSampling
from runtime.kernels.cuda.draw import launch_draw
from runtime.kernels.draw import draw_tokens_twin, of_rows
from tests.draw_rows import logits_of

assert os.environ.get("TRITON_INTERPRET") == "1", "start through test_interpreter.py"

SLOTS = (
    SlotSampling(is_sampled=True, seed=2**63 + 5, temperature=0.7),
    GREEDY,
    SlotSampling(is_sampled=True, seed=-1, temperature=2.0**-126, choice_index=2**32 - 1),
    SlotSampling(is_sampled=True, seed=9, temperature=2.0**126),
    SlotSampling(is_sampled=True, seed=2**32, temperature=1.3),
    GREEDY,  # padding
)
SLOTS_B = torch.tensor([4, 1, 0, 5, 3, 2])


@pytest.mark.parametrize("num_columns", [1, 5, 1024, 4500])
@pytest.mark.parametrize("has_slots", [False, True])
def test_draws_without_filters(num_columns: int, has_slots: bool) -> None:
    num_rows = 10
    logits = logits_of(num_rows, num_columns)
    state = SamplingState(len(SLOTS), torch.device("cpu"))
    state.write(range(len(SLOTS)), SLOTS)
    sampling = state.select(SLOTS_B, has_filters=False)
    if not has_slots:
        sampling = of_rows(sampling, None)
    generator = torch.Generator().manual_seed(num_columns)
    request = torch.randint(0, 6, (num_rows,), generator=generator, dtype=torch.int32)
    request[-1] = 6  # a padding row of a packed round
    position = torch.arange(num_rows) * 977
    ids = torch.randperm(3 * num_columns, generator=generator)[:num_columns]
    for names in (None, ids):
        wide = torch.full((num_rows, 2), -1)
        found = launch_draw(
            logits, sampling, request, position, 0, names_V=names, copy_M=wide[:, 1]
        )
        expected = draw_tokens_twin(logits, sampling, request, position, 0, names_V=names)
        assert torch.equal(found, expected)
        assert torch.equal(wide[:, 1], expected)
        assert (wide[:, 0] == -1).all()
    few = (logits[:6], sampling, None, position[:6], 17)
    found = launch_draw(*few, names_V=None, copy_M=None)
    assert torch.equal(found, draw_tokens_twin(*few))
