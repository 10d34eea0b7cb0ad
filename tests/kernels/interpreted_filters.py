"""Filtered draws of a round under the interpreter equal their twin; see `interpreted.py`."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from runtime.graphs.slot_sampling import GREEDY
from runtime.kernels.cuda.draw import launch_draw
from runtime.kernels.cuda.filtered_draw import launch_filtered_draw
from runtime.kernels.draw import draw_tokens_twin, of_rows, row_laws
from tests.draw_rows import FILTERS, kept_by_borders, logits_of, sampling_of, slot_of

assert os.environ.get("TRITON_INTERPRET") == "1", "start through test_interpreter.py"

NUM_ROWS = 8


@pytest.mark.parametrize("num_columns", [1, 33, 1500, 9000])
def test_what_is_kept_and_drawn(num_columns: int) -> None:
    """Every filter over every kind of row: ties, infinities, NaN, one value, none to draw."""
    sampling = sampling_of([slot_of(*item) for item in enumerate(FILTERS)] + [GREEDY])
    rows = logits_of(NUM_ROWS, num_columns)
    count = len(FILTERS) + 1
    generator = torch.Generator().manual_seed(num_columns)
    choices = torch.randperm(NUM_ROWS * count, generator=generator)[:24]
    logits, request = rows[choices // count].contiguous(), (choices % count).int()
    request[-1] = count  # a padding row of a packed round
    law = row_laws(logits, of_rows(sampling, request))
    assert torch.equal(kept_by_borders(logits, sampling, request), law)
    position = torch.arange(len(choices)) * 977
    names = torch.randperm(3 * num_columns, generator=generator)[:num_columns]
    copy = torch.full((len(choices), 2), -1)
    draw = (logits, sampling, request, position, 0)
    found = launch_filtered_draw(*draw, names_V=names, copy_M=copy[:, 1])
    assert torch.equal(found, draw_tokens_twin(*draw, names_V=names))
    assert torch.equal(copy[:, 1], found)


def test_one_row_of_each_request() -> None:
    sampling = of_rows(sampling_of([slot_of(*item) for item in enumerate(FILTERS)][::6]), None)
    draw = (logits_of(7, 70)[[0, 1, 6]], sampling, None, torch.arange(3), 17)
    found = launch_filtered_draw(*draw, names_V=None, copy_M=None)
    assert torch.equal(found, draw_tokens_twin(*draw))


@pytest.mark.parametrize("step", [0.0, 1e-30, 0.25])
def test_borders_among_many_ties(step: float) -> None:
    """Values of few kinds, all of them in one bin or in some."""
    num_columns = 2500
    generator = torch.Generator().manual_seed(7)
    steps = torch.randint(0, 4, (len(FILTERS), num_columns), generator=generator)
    request = torch.arange(len(FILTERS)).int()
    sampling = sampling_of([slot_of(*item) for item in enumerate(FILTERS)])
    logits = -steps * step
    law = row_laws(logits, of_rows(sampling, request))
    assert torch.equal(kept_by_borders(logits, sampling, request), law)


@pytest.mark.parametrize("form", ["apart", "every other"])
def test_numbers_of_any_bits_in_rows_that_lie_anyhow(form: str) -> None:
    """Both zeros, numbers below the normal ones, NaN of every payload; names that come twice."""
    num_rows, num_columns = len(FILTERS), 1100
    generator = torch.Generator().manual_seed(len(form))
    bits = torch.randint(-(2**31), 2**31, (num_rows, num_columns), generator=generator).int()
    bits[::3] &= -(2**31)
    bits[1::3] &= 2**31 - 1 - 0x7F800000
    logits = bits.view(torch.float32)
    room = {
        "apart": torch.full((num_rows, num_columns + 7), 9e9)[:, 3:-4],
        "every other": torch.full((num_rows, 2 * num_columns), 9e9)[:, ::2],
    }[form]
    room.copy_(logits)
    sampling = sampling_of([slot_of(*item) for item in enumerate(FILTERS)])
    request, position = torch.arange(num_rows).flip(0).int(), torch.arange(num_rows) + 2**31
    names = torch.randint(0, num_columns // 2, (num_columns,), generator=generator)
    draw = (sampling, request, position, 0)
    expected = draw_tokens_twin(logits, *draw, names_V=names)
    assert torch.equal(launch_filtered_draw(room, *draw, names_V=names), expected)
    unfiltered = (replace(sampling, has_filters=False), *draw[1:])
    expected = draw_tokens_twin(logits, *unfiltered, names_V=names)
    assert torch.equal(launch_draw(room, *unfiltered, names_V=names), expected)
    law = row_laws(logits, of_rows(sampling, request))
    assert torch.equal(kept_by_borders(logits, sampling, request), law)
