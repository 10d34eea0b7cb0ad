"""Copies of rows on CUDA: one program per row.

Any of them may begin a forward (`IS_OVERLAPPING`), so successors start after the wait.

Legend: M rows, D width, S slots, A states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import inner_contiguous, overlap_options, power_of_two

_WARPS = 4


@triton.jit(do_not_specialize=["stride_source", "stride_target"])
def copy_row_kernel(
    source_ptr, from_ptr, target_ptr, to_ptr, stride_source, stride_target,
    SCATTERED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Copy the row that an index names to its own place or, SCATTERED, to a named one."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = tl.load(from_ptr + row)
    target = tl.load(to_ptr + row) if SCATTERED else row
    x = tl.load(source_ptr + source * stride_source + columns, mask=mask)
    tl.store(target_ptr + target * stride_target + columns, x, mask=mask)


@triton.jit
def side_by_side_kernel(
    states_ptr, target_ptr,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Copy a row of each state; all are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for index in tl.static_range(COUNT):
        x = tl.load(states_ptr[index] + row * WIDTH + columns, mask=mask)
        tl.store(target_ptr + (row * COUNT + index) * WIDTH + columns, x, mask=mask)


def launch_take_rows(
    table_SD: torch.Tensor, index_M: torch.Tensor, out_MD: torch.Tensor | None = None
) -> torch.Tensor:
    """Launch `take_rows`."""
    shape = (index_M.shape[0], table_SD.shape[1])
    assert out_MD is None or out_MD.shape == shape, "rows of the table, as many as named"
    out = table_SD.new_empty(shape) if out_MD is None else out_MD
    _launch(table_SD, index_M, out, None)
    return out


def launch_keep_rows(
    x_ND: torch.Tensor, rows_M: torch.Tensor, kept_SD: torch.Tensor, slots_M: torch.Tensor
) -> None:
    """Launch `keep_rows`."""
    _launch(x_ND, rows_M, kept_SD, slots_M)


def launch_side_by_side(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """Launch `side_by_side`."""
    num_rows, width = states[0].shape
    out = states[0].new_empty((num_rows, len(states) * width))
    if num_rows == 0:
        return out
    overlapped, options = overlap_options(out.device, None)
    side_by_side_kernel[(num_rows,)](
        tuple(state.contiguous() for state in states),
        out,
        COUNT=len(states),
        **copy_constants(width),
        OVERLAP=overlapped,
        num_warps=_WARPS,
        **options,
    )
    return out


def _launch(
    source_XD: torch.Tensor,
    from_M: torch.Tensor,
    target_XD: torch.Tensor,
    to_M: torch.Tensor | None,
) -> None:
    num_rows, width = from_M.shape[0], source_XD.shape[1]
    assert target_XD.stride(1) == 1, "rows are written in one piece"
    assert source_XD.dtype == target_XD.dtype, "a copy changes no dtype"
    if num_rows == 0:
        return
    source_XD, from_M = inner_contiguous(source_XD), from_M.contiguous()
    overlapped, options = overlap_options(target_XD.device, None)
    copy_row_kernel[(num_rows,)](
        source_XD,
        from_M,
        target_XD,
        from_M if to_M is None else to_M.contiguous(),
        source_XD.stride(0),
        target_XD.stride(0),
        SCATTERED=to_M is not None,
        **copy_constants(width),
        OVERLAP=overlapped,
        num_warps=_WARPS,
        **options,
    )


def copy_constants(width: int) -> dict[str, int]:
    """Return the compile-time arguments that follow the width."""
    return {"WIDTH": width, "BLOCK": power_of_two(width)}
