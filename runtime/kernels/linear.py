"""Row-invariant dense layer: a row's result never depends on the rows beside it.

CPU: every product runs on exactly ROW_TILE rows, padded with zeros, so the BLAS library takes one
code path for every batch. That a row's bits do not depend on its place in the tile is a property of
the library; `runtime.kernels.probe` measures it for each weight shape at start-up.
CUDA: `runtime.kernels.cuda.linear`, tiles pinned by `runtime.kernels.gemm_table`.

Legend: M rows, K input features, N output features.
"""

from __future__ import annotations

import functools

import torch

from runtime.kernels.rows import ROW_TILE, pad_rows

_UPCAST_ROWS = 4096  # weight rows made float32 at a time, so the copy stays in cache


def linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply rows by a weight and add the bias.

    Args:
        x_MK: [M, K] float32, bfloat16 or float16.
        weight_NK: [N, K], dtype of `x_MK`.
        bias_N: [N] or None.
        out_dtype: dtype of the result; default that of `x_MK`.

    Returns:
        [M, N] in `out_dtype`.

    Exactness: float32 accumulation, bias added in float32, one rounding at the end; bits of a row
    are a function of that row and the weight alone.
    Graph-safe: yes (CUDA).
    """
    if x_MK.is_cuda:
        from runtime.kernels.cuda.linear import launch_linear

        return launch_linear(x_MK, weight_NK, bias_N, out_dtype=out_dtype)
    return linear_twin(x_MK, weight_NK, bias_N, out_dtype=out_dtype)


def linear_twin(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute `linear` with torch on fixed tiles of ROW_TILE rows."""
    num_rows = x_MK.shape[0]
    out_dtype = x_MK.dtype if out_dtype is None else out_dtype
    if num_rows == 0:
        return x_MK.new_empty((0, weight_NK.shape[0]), dtype=out_dtype)
    rows = pad_rows(x_MK)
    # oneDNN's bfloat16 product sums in float32 and rounds once; with a bias or a float32 result
    # that rounding would come too early, and float16 may be summed in float16.
    is_native = x_MK.dtype == torch.float32 or (
        x_MK.dtype == torch.bfloat16
        and out_dtype == torch.bfloat16
        and bias_N is None
        and _sums_bfloat16_in_float32()
    )
    out = _tiled_product(rows, weight_NK) if is_native else _upcast_product(rows, weight_NK)
    if bias_N is not None:
        out += bias_N.float()
    return out[:num_rows].to(out_dtype)


@functools.cache
def _sums_bfloat16_in_float32() -> bool:
    """Whether oneDNN serves bfloat16 products here; torch's own loops may round along the way."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _tiled_product(rows: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    out = rows.new_empty((rows.shape[0], weight_NK.shape[0]))
    weight_KN = weight_NK.t()
    for start in range(0, rows.shape[0], ROW_TILE):
        tile = slice(start, start + ROW_TILE)
        torch.mm(rows[tile], weight_KN, out=out[tile])
    return out


def _upcast_product(rows: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    rows = rows.float()
    parts = [
        _tiled_product(rows, weight_NK[start : start + _UPCAST_ROWS].float())
        for start in range(0, weight_NK.shape[0], _UPCAST_ROWS)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
