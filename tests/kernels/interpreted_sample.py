"""The sampling kernel under the interpreter equals its twin; see `interpreted.py`."""

from __future__ import annotations

import os

import pytest
import torch

from runtime.kernels.cuda.sample import launch_sample
from runtime.kernels.noise import NoiseRows
from runtime.kernels.sample import sample_twin

assert os.environ.get("TRITON_INTERPRET") == "1", "start through test_interpreter.py"

NUM_ROWS = 4
ROWS = NoiseRows(
    seed_low_M=torch.tensor([0, 2**32 - 1, 77, 5]),
    seed_high_M=torch.tensor([2**32 - 1, 0, 2**31, 9]),
    choice_index_M=torch.tensor([0, 3, 2**32 - 1, 1]),
    position_M=torch.tensor([0, 1, 131_071, 17]),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_columns", [5, 1500])
@pytest.mark.parametrize("has_flags", [False, True])
def test_sample(num_columns: int, dtype: torch.dtype, has_flags: bool) -> None:
    generator = torch.Generator().manual_seed(num_columns)
    weights = (torch.randn(NUM_ROWS, num_columns, generator=generator) * 2).to(dtype)
    weights[0, : num_columns // 2] = -torch.inf
    weights[1] = -torch.inf
    weights[2] = (weights[2] * 2).round() / 2  # ties where no noise is added
    flags = torch.tensor([True, True, False, True]) if has_flags else None
    ids = torch.randperm(3 * num_columns, generator=generator)[:num_columns]
    for noise_ids in (None, ids):
        for kind in (0, 17):
            found = launch_sample(weights, ROWS, kind, flags, noise_ids)
            expected = sample_twin(weights, ROWS, kind, is_sampled_M=flags, noise_ids_V=noise_ids)
            assert torch.equal(found, expected)
            wide = torch.full((NUM_ROWS, 2), -1)
            named = launch_sample(
                weights, ROWS, kind, flags, noise_ids, names_V=ids, copy_M=wide[:, 1]
            )
            assert torch.equal(named, ids[expected])
            assert wide[:, 1].equal(named)
            assert (wide[:, 0] == -1).all()
