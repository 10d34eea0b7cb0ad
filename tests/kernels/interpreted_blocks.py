"""Kernels of block drafts under the interpreter equal their twins; see `interpreted.py`."""

from __future__ import annotations

import os

import pytest
import torch

from runtime.kernels.block_rows import keep_chances_twin, place_blocks_twin
from runtime.kernels.context_kv import write_context_kv_twin
from runtime.kernels.corrected import corrected_argmax_twin
from runtime.kernels.cuda import block_rows, context_kv, corrected, head, kv_write, norm, rope
from runtime.kernels.norm import RowNorm
from runtime.kv import KVLayer
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


@pytest.mark.parametrize(("width", "first_slot"), [(1, 0), (2, 1), (5, 0), (5, 1), (9, 1)])
@pytest.mark.parametrize("num_requests", [1, 3])
def test_rows_of_blocks(num_requests: int, width: int, first_slot: int) -> None:
    lengths = torch.tensor([17, 0, 5])[:num_requests]
    newest = torch.tensor([31, 0, 9])[:num_requests]
    num_drafts = torch.tensor([width - first_slot, 0, 1])[:num_requests]
    kv_slots = torch.arange(num_requests * (width + 1)).view(num_requests, -1) * 3
    sizes = {"width": width, "first_slot": first_slot, "mask_id_target": 77}
    got = block_rows.launch_place_blocks(lengths, newest, num_drafts, kv_slots, **sizes)
    expected = place_blocks_twin(lengths, newest, num_drafts, kv_slots, **sizes)
    for name in expected.__slots__:
        found, wanted = getattr(got, name), getattr(expected, name)
        assert found.dtype == wanted.dtype, name
        assert torch.equal(found, wanted), name
    assert got.ids_target_N.view(num_requests, width)[0].tolist() == [31] + [77] * (width - 1)
    assert got.ends_N[0] == 17 + width - 1


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_chances_of_drafts_that_count(num_drafts: int) -> None:
    wide = plain(4, 7, seed=1, dtype=torch.float32)
    counts = torch.tensor([num_drafts, 0, 1, 0])
    slots = torch.tensor([2, 0, 3, 4])
    for chances in (wide[:, :num_drafts], wide[:, 1 : 1 + num_drafts]):
        kept = [torch.ones(5, 6), torch.ones(5, 6)]
        block_rows.launch_keep_chances(chances, counts, slots, kept[0])
        keep_chances_twin(chances, counts, slots, kept[1])
        assert torch.equal(kept[0], kept[1])
        assert torch.equal(kept[0][2, :num_drafts], chances[0])
        assert int((kept[0] != 1).sum()) == num_drafts + 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (3, 24), (20, 8)])
def test_context_keys_have_the_bits_of_one_operation_after_the_other(
    heads: int, head_dim: int, is_normed: bool, dtype: torch.dtype
) -> None:
    kv = plain(5, 2 * heads, head_dim, seed=1, dtype=dtype)
    weight = plain(head_dim, seed=2, dtype=dtype)
    table = plain(40, head_dim, seed=3, dtype=torch.float32)
    positions, slots = torch.tensor([39, 0, 7, 8, 9]), torch.tensor([11, 0, 4, 5, 6])
    shape = (3, heads, 4, head_dim)
    found, apart, twin = (
        KVLayer(k=torch.zeros(shape, dtype=dtype), v=torch.zeros(shape, dtype=dtype))
        for _ in range(3)
    )
    own = RowNorm(weight_D=weight, eps=1e-5) if is_normed else None
    context_kv.launch_write_context_kv(kv, own, positions, table, found, slots)
    keys, values = kv.chunk(2, dim=1)
    if own is not None:
        keys = norm.launch_head_rms_norm(keys, own.weight_D, own.eps)
    _, keys = rope.launch_apply_rope(keys, keys, positions, table)
    kv_write.launch_write_kv(keys, values, apart, slots)
    assert same_bits(found.k, apart.k)
    assert same_bits(found.v, apart.v)
    write_context_kv_twin(kv, own, positions, table, twin, slots)
    torch.testing.assert_close(found.k, twin.k, rtol=3e-3, atol=3e-3)  # other sums of squares
    assert same_bits(found.v, twin.v)
