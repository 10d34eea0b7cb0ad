"""Attention of packed rows over the paged pool.

Keys are taken in segments anchored at absolute positions, of a size that follows the head size
alone (`attention_segment`), each reduced on its own and combined in ascending order. Keys beyond a
row's limit contribute exactly +0, and a segment that is masked for a row leaves its running state
as it was, so neither the longest request in the batch nor the rows beside it change a row's bits.

CPU: tiles of ROW_TILE rows of one request, padded, so every product has one shape per model.

Legend: M rows, H query heads, G key heads, P head size, R rows of a tile times H / G,
S keys of a segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from runtime.batch import PreparedBatch
from runtime.kernels.kv_write import write_kv
from runtime.kernels.norm import HeadNorms, head_rms_norm
from runtime.kernels.rope import apply_rope
from runtime.kernels.rows import ROW_TILE, attention_segment, fixed_exp
from runtime.kv import KVLayer

ROUND_LAYOUTS: Mapping[str, Literal["packed", "dense"]] = {"cpu": "packed", "cuda": "dense"}
"""How a backend takes the rows of a ragged round: packed, or spread out to equally many rows of
each request, so that one program serves all rows of a request and reads its keys once."""


def paged_attention(
    q_MHP: torch.Tensor,
    layer: KVLayer,
    batch: PreparedBatch,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend from every row to positions 0..its limit of its request (`PreparedBatch.limits_N`).

    Args:
        q_MHP: [M, H, P], H a multiple of the pool's key heads.
        layer: pool of one layer; the rows' own keys and values are already written.
        batch: rows, positions and block tables.
        scale: factor of the scores, usually P ** -0.5.
        window: a row at position p sees positions above p - window only; None sees all.

    Returns:
        [M, H, P], dtype of `q_MHP`.

    Exactness: bits of a row depend on its query, its position, its limit and the keys and values
    that it may see. Slots beyond a row's limit may hold anything, NaN included.
    Graph-safe: yes (CUDA); `batch.max_length` sizes the grid.
    """
    if q_MHP.is_cuda:
        from runtime.kernels.cuda.attention import launch_paged_attention

        return launch_paged_attention(q_MHP, layer, batch, scale=scale, window=window)
    return paged_attention_twin(q_MHP, layer, batch, scale=scale, window=window)


def attend_new_rows(
    q_MHP: torch.Tensor,
    k_MGP: torch.Tensor,
    v_MGP: torch.Tensor,
    layer: KVLayer,
    batch: PreparedBatch,
    cos_sin_TP: torch.Tensor,
    *,
    scale: float,
    norms: HeadNorms | None = None,
    window: int | None = None,
    segment: int | None = None,
) -> torch.Tensor:
    """Norm and rotate queries and keys, write keys and values to the pool, and attend.

    Args:
        q_MHP: [M, H, P] before norm and rotation.
        k_MGP: [M, G, P] before norm and rotation.
        v_MGP: [M, G, P].
        layer: pool of one layer; the slots of the rows are overwritten.
        batch: rows, positions, slots and block tables.
        cos_sin_TP: float32 rotary table.
        scale: as in `paged_attention`.
        norms: of the query and key heads, or None.
        window: as in `paged_attention`.
        segment: keys of a segment, None those of `attention_segment`. Others leave the contract:
            they sum keys in another order, and only where one CUDA kernel does all of this
            (benchmarks only).

    Returns:
        [M, H, P], dtype of `q_MHP`.

    Exactness: the bits of `head_rms_norm`, `apply_rope`, `write_kv` and `paged_attention` one after
    another; on CUDA a dense batch takes one kernel, and packed rows are spread out for it
    (`ROUND_LAYOUTS`).
    Graph-safe: yes (CUDA).
    """
    spread = batch.spread
    if spread is not None and ROUND_LAYOUTS[q_MHP.device.type] == "dense":
        rows_M = spread.packed_rows_M
        out_MHP = attend_new_rows(
            q_MHP.index_select(0, rows_M),
            k_MGP.index_select(0, rows_M),
            v_MGP.index_select(0, rows_M),
            layer,
            spread.batch,
            cos_sin_TP,
            scale=scale,
            norms=norms,
            window=window,
            segment=segment,
        )
        return out_MHP.index_select(0, spread.dense_rows_N)
    if q_MHP.is_cuda and batch.rows_per_request is not None:
        from runtime.kernels.cuda.attention import NewRows, launch_paged_attention

        new = NewRows(k_MGP=k_MGP, v_MGP=v_MGP, cos_sin_TP=cos_sin_TP, norms=norms)
        return launch_paged_attention(
            q_MHP, layer, batch, scale=scale, window=window, new=new, segment=segment
        )
    if norms is not None:
        q_MHP = head_rms_norm(q_MHP, norms.q_P, norms.eps)
        k_MGP = head_rms_norm(k_MGP, norms.k_P, norms.eps)
    q_MHP, k_MGP = apply_rope(q_MHP, k_MGP, batch.positions_N, cos_sin_TP)
    write_kv(k_MGP, v_MGP, layer, batch.slots_N)
    return paged_attention(q_MHP, layer, batch, scale=scale, window=window)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RowTile:
    """Up to ROW_TILE rows of one request.

    Args:
        rows: indices into the batch.
        positions: absolute position that each row's window ends at.
        limits: last position that each row sees; at or after `positions`.
        blocks: the request's block table, int64.
    """

    rows: torch.Tensor
    positions: list[int]
    limits: list[int]
    blocks: torch.Tensor

    def split(self) -> Iterator[_RowTile]:
        """Yield a tile for each row."""
        rows = zip(self.rows.split(1), self.positions, self.limits, strict=True)
        for row, position, limit in rows:
            yield _RowTile(rows=row, positions=[position], limits=[limit], blocks=self.blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    """Online-softmax state of a tile: maximum and sum [G, R, 1], weighted values [G, R, P]."""

    maximum: torch.Tensor
    total: torch.Tensor
    values: torch.Tensor


def paged_attention_twin(
    q_MHP: torch.Tensor,
    layer: KVLayer,
    batch: PreparedBatch,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Compute `paged_attention` with torch in float32."""
    out = torch.empty_like(q_MHP, memory_format=torch.contiguous_format)
    attend = partial(_attend_tile, q_MHP, layer, scale=scale, window=window)
    for tile in _row_tiles(batch):
        values = attend(tile)
        # 0 times an infinite value is NaN: a row may have met a key that only other rows see.
        if len(tile.positions) > 1 and not bool(values.isfinite().all()):
            values = torch.cat([attend(single) for single in tile.split()])
        out[tile.rows] = values.to(q_MHP.dtype)
    return out


def _row_tiles(batch: PreparedBatch) -> Iterator[_RowTile]:
    by_request: dict[int, list[int]] = {}
    for row, request in enumerate(batch.row_request_N.tolist()):
        by_request.setdefault(request, []).append(row)
    own, windows = batch.positions_N, batch.window_positions_N
    positions = (own if windows is None else windows).tolist()
    limits = (own if batch.limits_N is None else batch.limits_N).tolist()
    for request, rows in by_request.items():
        blocks = batch.block_tables_BT[request].long()
        for start in range(0, len(rows), ROW_TILE):
            part = rows[start : start + ROW_TILE]
            yield _RowTile(
                rows=torch.tensor(part),
                positions=[positions[row] for row in part],
                limits=[limits[row] for row in part],
                blocks=blocks,
            )


def _attend_tile(
    q_MHP: torch.Tensor, layer: KVLayer, tile: _RowTile, *, scale: float, window: int | None
) -> torch.Tensor:
    """Return float32 [T, H, P] for the rows of a tile."""
    q_THP = q_MHP[tile.rows]
    num_rows, num_heads, head_dim = q_THP.shape
    num_kv_heads = layer.k.shape[1]
    group = num_heads // num_kv_heads
    q = torch.zeros((num_kv_heads, ROW_TILE, group, head_dim), dtype=torch.float32)
    q[:, :num_rows] = q_THP.view(num_rows, num_kv_heads, group, head_dim).transpose(0, 1)
    q_GRP = q.view(num_kv_heads, ROW_TILE * group, head_dim)
    num_padding = ROW_TILE - num_rows
    limits_T1 = torch.tensor(tile.limits + tile.limits[:1] * num_padding).unsqueeze(1)
    positions_T1 = torch.tensor(tile.positions + tile.positions[:1] * num_padding).unsqueeze(1)
    first_key = 0 if window is None else max(0, min(tile.positions) - window + 1)
    last_key = max(tile.limits)
    running: _Running | None = None
    size = attention_segment(head_dim)
    for start in range(first_key // size * size, last_key + 1, size):
        segment = range(start, start + size)
        keys = range(max(first_key, segment.start), min(last_key + 1, segment.stop))
        k_GSP = _load_segment(layer.k, tile.blocks, segment, keys)
        v_GSP = _load_segment(layer.v, tile.blocks, segment, keys)
        bias_TS = _segment_bias(limits_T1, positions_T1, segment, window)
        part = _attend_segment(q_GRP, k_GSP, v_GSP, bias_TS, scale)
        running = part if running is None else _combine(running, part)
    assert running is not None, "a row always sees its own position"
    # + 0.0 turns -0 into +0, as any combination with a masked segment does.
    out_GRP = running.values / running.total + 0.0
    out = out_GRP.view(num_kv_heads, ROW_TILE, group, head_dim)[:, :num_rows]
    return out.transpose(0, 1).reshape(num_rows, num_heads, head_dim)


def _load_segment(
    pool: torch.Tensor, blocks: torch.Tensor, segment: range, keys: range
) -> torch.Tensor:
    """Gather a segment as float32 [G, S, P], zero where no row of the tile looks."""
    _, num_kv_heads, kv_block_size, head_dim = pool.shape
    first_block = segment.start // kv_block_size
    last_block = (keys.stop - 1) // kv_block_size
    num_blocks = last_block + 1 - first_block
    skip = segment.start - first_block * kv_block_size
    width = max(num_blocks * kv_block_size, skip + len(segment))
    out = torch.empty((num_kv_heads, width, head_dim), dtype=torch.float32)
    copied = out[:, : num_blocks * kv_block_size]
    gathered = torch.index_select(pool, 0, blocks[first_block : last_block + 1])
    copied.unflatten(1, (num_blocks, kv_block_size)).copy_(gathered.transpose(0, 1))
    base = segment.start - skip
    out[:, : keys.start - base] = 0.0
    out[:, keys.stop - base :] = 0.0
    return out[:, skip : skip + len(segment)].contiguous()


def _segment_bias(
    limits_T1: torch.Tensor, positions_T1: torch.Tensor, segment: range, window: int | None
) -> torch.Tensor:
    """Give minus infinity for keys that a row must not see, else 0, [T, S]."""
    keys_S = torch.arange(segment.start, segment.stop)
    hidden_TS = keys_S > limits_T1
    if window is not None:
        hidden_TS |= keys_S <= positions_T1 - window
    return torch.zeros(hidden_TS.shape).masked_fill_(hidden_TS, float("-inf"))


def _attend_segment(
    q_GRP: torch.Tensor,
    k_GSP: torch.Tensor,
    v_GSP: torch.Tensor,
    bias_TS: torch.Tensor,
    scale: float,
) -> _Running:
    scores_GRS = torch.bmm(q_GRP, k_GSP.transpose(1, 2))
    scores_GRS *= scale
    scores_GRS.unflatten(1, (ROW_TILE, -1)).add_(bias_TS.unsqueeze(1))
    maximum = scores_GRS.amax(dim=-1, keepdim=True)
    scores_GRS -= _finite(maximum)
    weights_GRS = fixed_exp(scores_GRS)
    total = weights_GRS.sum(dim=-1, keepdim=True)
    return _Running(maximum=maximum, total=total, values=torch.bmm(weights_GRS, v_GSP))


def _combine(before: _Running, part: _Running) -> _Running:
    """Fold a segment into the state; a segment masked for a row adds 0 times finite values."""
    maximum = torch.maximum(before.maximum, part.maximum)
    keep = fixed_exp(before.maximum - _finite(maximum))
    add = fixed_exp(part.maximum - _finite(maximum))
    return _Running(
        maximum=maximum,
        total=before.total * keep + part.total * add,
        values=before.values * keep + part.values * add,
    )


def _finite(maximum: torch.Tensor) -> torch.Tensor:
    """Replace the maximum of a row that sees no key by 0, so that no NaN arises."""
    return torch.where(maximum == float("-inf"), 0.0, maximum)
