"""The ordered combination of attention segments on CUDA: one program per row and head.

Legend: M rows, H query heads, P head size, S segments of the longest request.
"""

from __future__ import annotations

import triton
import triton.language as tl

from runtime.kernels.cuda.device import power_of_two
from runtime.kernels.rows import SEGMENT


@triton.jit(do_not_specialize=["row_start", "num_segments", "window"])
def attention_combine_kernel(
    values_ptr,
    maximum_ptr,
    total_ptr,
    positions_ptr,
    limits_ptr,
    out_ptr,
    row_start,
    num_segments,
    window,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SEGMENT_KEYS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Fold one head's segments in ascending order; the loop's bounds follow the row's limit."""
    local_row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = row_start + local_row
    position = tl.load(positions_ptr + row).to(tl.int32)
    first_segment = tl.maximum(position - window + 1, 0) // SEGMENT_KEYS
    last_segment = tl.load(limits_ptr + row).to(tl.int32) // SEGMENT_KEYS
    lanes = tl.arange(0, BLOCK_P)
    mask = lanes < HEAD_DIM
    base = (local_row * HEADS + head) * num_segments
    maximum = tl.load(maximum_ptr + base + first_segment)
    total = tl.load(total_ptr + base + first_segment)
    values = tl.load(values_ptr + (base + first_segment) * HEAD_DIM + lanes, mask=mask, other=0.0)
    for segment in range(first_segment + 1, last_segment + 1):
        part_maximum = tl.load(maximum_ptr + base + segment)
        part_total = tl.load(total_ptr + base + segment)
        part_values = tl.load(
            values_ptr + (base + segment) * HEAD_DIM + lanes, mask=mask, other=0.0
        )
        new_maximum = tl.maximum(maximum, part_maximum)
        keep = tl.exp2(maximum - new_maximum)
        add = tl.exp2(part_maximum - new_maximum)
        total = total * keep + part_total * add
        values = values * keep + part_values * add
        maximum = new_maximum
    out = out_ptr + (row * HEADS + head) * HEAD_DIM + lanes
    tl.store(out, (values / total).to(out_ptr.dtype.element_ty), mask=mask)


def combine_constants(num_heads: int, head_dim: int) -> dict[str, int]:
    """Return the compile-time arguments of `attention_combine_kernel`."""
    return {
        "HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "SEGMENT_KEYS": SEGMENT,
        "BLOCK_P": power_of_two(head_dim),
    }
