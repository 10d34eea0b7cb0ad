"""Kernels of block drafts under the interpreter equal their twins; see `interpreted.py`."""

from __future__ import annotations

import os

import pytest
import torch

from runtime.kernels.corrected import corrected_argmax_twin
from runtime.kernels.cuda import corrected, head
from tests.kernels.ladder import plain, same_bits

assert os.environ.get("TRITON_INTERPRET") == "1", "start through test_interpreter.py"

DTYPES = [torch.float32, torch.float16]
NUM_IDS = 70


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [16, 32, 72])  # fewer features than a step, one step, several
def test_a_corrected_choice_has_the_bits_of_its_parts(rank: int, dtype: torch.dtype) -> None:
    weight = plain(NUM_IDS, rank, seed=2, dtype=dtype)
    weight[[3, 41, 66]] = weight[[20, 20, 20]]
    table = plain(23, rank, seed=1, dtype=dtype)
    ids = torch.tensor([22, 0, 0, 7] * 5)[:19]
    wide = plain(19, 3, NUM_IDS, seed=3, dtype=torch.float32) * 4
    wide[:, :, [3, 41, 66]] = wide[:, :, [20, 20, 20]]  # ties within a tile and across tiles
    wide[0, :, 5] = float("nan")
    wide[1] = float("nan")
    names, room = torch.arange(NUM_IDS) * 3 + 1, torch.zeros((19, 3), dtype=torch.int64)
    for slot in range(3):
        logits = wide[:, slot]
        sums = logits + head.launch_head_logits(table[ids], weight)
        expected = head.launch_logits_argmax(sums, names, None)
        best = sums.nan_to_num(nan=float("-inf")).amax(dim=1)
        for count in (1, 16, 19):
            for rows, index in ((table, ids[:count]), (table[ids[:count]], None)):
                room.fill_(-1)
                found, found_best = corrected.launch_corrected_argmax(
                    logits[:count],
                    rows,
                    weight,
                    ids_M=index,
                    names_V=names,
                    copy_M=room[:count, slot],
                )
                assert torch.equal(found, expected[:count])
                assert same_bits(found_best, best[:count])
                assert torch.equal(room[:count, slot], found)
                assert int((room == -1).sum()) == room.numel() - count
        twin, _ = corrected_argmax_twin(logits, table, weight, ids_M=ids, names_V=names)
        assert torch.equal(twin, expected)


def test_no_rows() -> None:
    weight = plain(NUM_IDS, 16, seed=2, dtype=torch.float32)
    ids, best = corrected.launch_corrected_argmax(weight.new_empty((0, NUM_IDS)), weight, weight)
    assert ids.shape == best.shape == (0,)
