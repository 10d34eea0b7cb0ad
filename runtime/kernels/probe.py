"""Start-up measurement of what the kernels take from a library: placement-independent products.

The CPU twins rest on one property of the machine's BLAS: in a product of fixed shape, a row's bits
do not depend on its place or on the other rows. These probes measure it on the device at hand and
return facts; the caller decides and raises.

Legend: M rows, N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from runtime.batch import PreparedBatch
from runtime.config.values import dtype_name
from runtime.kernels.attention import paged_attention
from runtime.kernels.head import head_logits
from runtime.kernels.linear import linear
from runtime.kernels.rows import ROW_TILE, attention_segment
from runtime.kv import KVLayer

_SHIFTS = (0, 1, 6, 11)
_CUDA_ROWS = (20, 48)  # with a single row, these reach every BLOCK_M
_PROBE_KV_BLOCK_SIZE = 64
_PROBE_KEYS = 44  # of a second segment


@dataclass(frozen=True, kw_only=True, slots=True)
class RowInvariance:
    """What a probe of one shape found.

    Args:
        product: what was probed, e.g. "float32 product of 960 x 576".
        largest_difference: largest absolute difference between two placements of a row.
    """

    product: str
    largest_difference: float

    @property
    def is_invariant(self) -> bool:
        """Whether every placement gave the same bits."""
        return self.largest_difference == 0.0


def row_invariance_probe(weight_NK: torch.Tensor, *, is_head: bool = False) -> RowInvariance:
    """Measure whether this device's `linear` or `head_logits` honours the contract for a weight.

    Compares full batches with single rows and with the same rows at other places, on inputs that
    span twelve orders of magnitude. Cheap enough to run once per distinct shape at start-up.

    Args:
        weight_NK: [N, K] on the device to probe.
        is_head: whether it is multiplied by `head_logits`.

    Sync: yes.
    """
    product = head_logits if is_head else linear
    worst = 0.0
    for num_rows in _CUDA_ROWS if weight_NK.is_cuda else (ROW_TILE,):
        x_MK = _wide_rows(num_rows, weight_NK.shape[1]).to(weight_NK.device, weight_NK.dtype)
        worst = max(worst, _placement_difference(lambda x: product(x, weight_NK), x_MK))
    shape = f"{weight_NK.shape[0]} x {weight_NK.shape[1]}"
    return RowInvariance(
        product=f"{dtype_name(weight_NK.dtype)} product of {shape}", largest_difference=worst
    )


def attention_invariance_probe(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> RowInvariance:
    """Measure whether this device's `paged_attention` honours the contract for a head layout.

    Args:
        num_heads: query heads, a multiple of `num_kv_heads`.
        num_kv_heads: key heads.
        head_dim: head size.
        dtype: of queries and pool.
        device: to probe.

    Sync: yes.
    """
    length = attention_segment(head_dim) + _PROBE_KEYS
    num_blocks = -(-length // _PROBE_KV_BLOCK_SIZE)
    kv_shape = (num_blocks, num_kv_heads, _PROBE_KV_BLOCK_SIZE, head_dim)
    generator = torch.Generator().manual_seed(1)
    k, v, q = (
        torch.randn(shape, generator=generator).to(device, dtype)
        for shape in (kv_shape, kv_shape, (ROW_TILE, num_heads, head_dim))
    )
    layer = KVLayer(k=k, v=v)
    table = torch.arange(num_blocks, dtype=torch.int32, device=device).unsqueeze(0)

    def attend(positions_M1: torch.Tensor) -> torch.Tensor:
        positions = positions_M1.squeeze(1)
        queries = q[positions - (length - ROW_TILE)]
        count = positions.shape[0]
        batch = PreparedBatch(
            ids_target_N=positions,
            positions_N=positions,
            slots_N=positions,
            row_request_N=torch.zeros(count, dtype=torch.int32, device=device),
            block_tables_BT=table,
            max_length=length,
        )
        return paged_attention(queries, layer, batch, scale=head_dim**-0.5).flatten(1)

    positions = torch.arange(length - ROW_TILE, length, device=device)
    worst = _placement_difference(attend, positions.unsqueeze(1))
    heads = f"{num_heads} query and {num_kv_heads} key heads of {head_dim}"
    return RowInvariance(
        product=f"{dtype_name(dtype)} attention of {heads}", largest_difference=worst
    )


def _placement_difference(
    op: Callable[[torch.Tensor], torch.Tensor], rows_MX: torch.Tensor
) -> float:
    """Return the largest difference of rows computed elsewhere in the batch, or alone."""
    full = op(rows_MX)
    worst = 0.0
    for shift in _SHIFTS:
        rolled = op(rows_MX.roll(shift, 0)).roll(-shift, 0)
        alone = op(rows_MX[shift : shift + 1])
        worst = max(worst, _difference(rolled, full))
        worst = max(worst, _difference(alone, full[shift : shift + 1]))
    return worst


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference; NaN equals NaN, and differs from all else by inf."""
    is_equal = (a == b) | (a.isnan() & b.isnan())
    distance = (a.float() - b.float()).abs().nan_to_num(nan=float("inf"))
    return float(distance.masked_fill(is_equal, 0.0).max())


def _wide_rows(num_rows: int, width: int) -> torch.Tensor:
    """Make rows whose elements span twelve orders of magnitude up to 10."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = 10.0 ** (torch.rand(num_rows, width, generator=generator) * 12 - 11)
    return torch.randn(num_rows, width, generator=generator) * magnitudes
