"""Packing of rows into a `PreparedBatch`: positions, KV slots and block tables on the device.

Legend: N rows, B views, T blocks in the longest table. Host work only; the device is written, never
read, so packing costs no synchronisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from runtime.batch import ROW_TILE_ROWS, PreparedBatch, on_device
from runtime.spec.types import RequestView


class Row(NamedTuple):
    """One token of one request at one absolute position; the id is a target id."""

    view_index: int
    position: int
    id_target: int


class Place(NamedTuple):
    """A row whose id is already on the device: view and absolute position."""

    view_index: int
    position: int


def kv_slot(block_table: Sequence[int], position: int, kv_block_size: int) -> int:
    """Return the flat KV slot of an absolute position.

    Raises:
        IndexError: the table does not reach that position.
    """
    return block_table[position // kv_block_size] * kv_block_size + position % kv_block_size


def pack_block_tables(views: Sequence[RequestView], *, device: torch.device) -> torch.Tensor:
    """Return the views' block tables as int32 [B, T], padded with 0."""
    width = max((len(view.block_table) for view in views), default=0)
    rows = [[*view.block_table, *[0] * (width - len(view.block_table))] for view in views]
    return on_device(rows, dtype=torch.int32, device=device).reshape(len(views), width)


def pack_rows(
    rows: Sequence[tuple[int, int, int]],
    views: Sequence[RequestView],
    *,
    kv_block_size: int,
    device: torch.device,
) -> PreparedBatch:
    """Pack rows whose ids the host knows.

    Args:
        rows: (view index, absolute position, target id); rows of one view in ascending position.
        views: the requests; `row_request_N` and `block_tables_BT` follow their order.
        kv_block_size: tokens of a KV block.
        device: where the batch lives.

    Raises:
        IndexError: a position lies beyond its view's block table.
    """
    ids_target_N = on_device([row[2] for row in rows], device=device)
    return pack_places(
        [Place(row[0], row[1]) for row in rows],
        views,
        ids_target_N=ids_target_N,
        block_tables_BT=pack_block_tables(views, device=device),
        kv_block_size=kv_block_size,
    )


def pack_places(
    places: Sequence[tuple[int, int]],
    views: Sequence[RequestView],
    *,
    ids_target_N: torch.Tensor,
    block_tables_BT: torch.Tensor,
    kv_block_size: int,
) -> PreparedBatch:
    """Pack rows whose ids are on the device already (the steps of a draft chain).

    Args:
        places: (view index, absolute position) per row.
        views: the requests.
        ids_target_N: int64, one target id per place.
        block_tables_BT: int32, from `pack_block_tables(views)`.
        kv_block_size: tokens of a KV block.
    """
    device = ids_target_N.device
    slots = [kv_slot(views[v].block_table, position, kv_block_size) for v, position in places]
    positions = [position for _, position in places]
    tiles = row_tiles([v for v, _ in places])
    return PreparedBatch(
        ids_target_N=ids_target_N,
        positions_N=on_device(positions, device=device),
        slots_N=on_device(slots, device=device),
        row_request_N=on_device([v for v, _ in places], dtype=torch.int32, device=device),
        block_tables_BT=block_tables_BT,
        max_length=max(positions, default=-1) + 1,
        tiles_U2=on_device(tiles, dtype=torch.int32, device=device).reshape(len(tiles), 2),
    )


def row_tiles(requests: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first row, number of rows) of groups of neighbours of one request, for kernels.

    Args:
        requests: of each row.
    """
    tiles: list[tuple[int, int]] = []
    for row, request in enumerate(requests):
        if tiles:
            first, count = tiles[-1]
            if request == requests[first] and count < ROW_TILE_ROWS:
                tiles[-1] = (first, count + 1)
                continue
        tiles.append((row, 1))
    return tiles
