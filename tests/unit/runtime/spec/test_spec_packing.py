"""Rows land in the slots that their request's block table names."""

from __future__ import annotations

import pytest
import torch

from runtime.spec.packing import kv_slot, pack_block_tables, pack_places, pack_rows
from runtime.spec.types import RequestView, SamplingParams
from tests.unit.runtime.spec.stub_model import CPU, make_view


def two_views() -> list[RequestView]:
    params = SamplingParams()
    return [
        make_view([1, 2], params, num_prompt_tokens=1, block_table=[5, 2, 9]),
        make_view([3], params, num_prompt_tokens=1, block_table=[7]),
    ]


def test_slots_tables_and_length() -> None:
    batch = pack_rows(
        [(0, 0, 11), (0, 5, 12), (1, 3, 13)], two_views(), kv_block_size=4, device=CPU
    )
    assert batch.ids_target_N.tolist() == [11, 12, 13]
    assert batch.positions_N.tolist() == [0, 5, 3]
    assert batch.slots_N.tolist() == [20, 9, 31]
    assert batch.row_request_N.tolist() == [0, 0, 1]
    assert batch.block_tables_BT.tolist() == [[5, 2, 9], [7, 0, 0]]
    assert (batch.max_length, batch.num_rows) == (6, 3)
    dtypes = (batch.ids_target_N.dtype, batch.positions_N.dtype, batch.slots_N.dtype)
    assert dtypes == (torch.int64,) * 3
    assert (batch.row_request_N.dtype, batch.block_tables_BT.dtype) == (torch.int32,) * 2


def test_device_ids_pack_like_host_ids() -> None:
    views = two_views()
    host = pack_rows([(0, 4, 8), (1, 1, 6)], views, kv_block_size=4, device=CPU)
    tables = pack_block_tables(views, device=CPU)
    device = pack_places(
        [(0, 4), (1, 1)],
        views,
        ids_target_N=torch.tensor([8, 6]),
        block_tables_BT=tables,
        kv_block_size=4,
    )
    for name in ("ids_target_N", "positions_N", "slots_N", "row_request_N", "block_tables_BT"):
        assert torch.equal(getattr(host, name), getattr(device, name))


def test_nothing_packs_to_nothing() -> None:
    batch = pack_rows([], [], kv_block_size=4, device=CPU)
    assert (batch.num_rows, batch.max_length, tuple(batch.block_tables_BT.shape)) == (0, 0, (0, 0))


def test_a_position_beyond_the_table_is_refused() -> None:
    with pytest.raises(IndexError):
        kv_slot([5], 4, 4)
