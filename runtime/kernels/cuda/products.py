"""The sums of fused products on CUDA: weights early, K in one part or in a part for each warp.

With several parts a program's warps run along K, each with its own accumulator, and the
accumulators are added in a fixed tree. The chain of dependent instructions is shorter by the number
of parts; which parts there are is pinned by the tables, so rows and tiles move no bit.

Legend: M rows, K input features, N output features, Q parts of K.
"""

from __future__ import annotations

import triton
import triton.language as tl

PREFETCH_FEATURES = 2048  # of a weight row, so that a large weight does not sweep the L2
LINE_ELEMENTS = tl.constexpr(64)  # of two bytes, in a 128-byte line


@triton.jit
def prefetch_lines(pointers):
    """Bring the lines of some addresses into the L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _load_rows(
    rows, is_row, k, FEATURES: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    PART_FEATURES: tl.constexpr, IS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Load a step of rows [M, 1] or weights [1, N]: [M, K] or [K, N], of Q parts behind each other.

    The step begins at feature `k` of each part.
    """
    steps = k + tl.arange(0, BLOCK_K)
    if PARTS == 1:
        ks = steps[:, None] if IS_WEIGHT else steps[None, :]
        mask = is_row
    else:
        within = steps[None, :, None] if IS_WEIGHT else steps[None, None, :]
        ks = tl.arange(0, PARTS)[:, None, None] * PART_FEATURES + within
        rows = tl.expand_dims(rows, 0)
        mask = tl.expand_dims(is_row, 0)
    if FEATURES % (BLOCK_K * PARTS) != 0:
        mask = mask & (ks < FEATURES)
    return tl.load(rows + ks, mask=mask, other=0.0)


@triton.jit
def early_weights(
    w_rows, is_column,
    FEATURES: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    PART_FEATURES: tl.constexpr, PRELOAD: tl.constexpr,
):  # fmt: skip
    """Load a program's weights whole where PRELOAD; nothing here awaits other kernels."""
    weights = ()
    if PRELOAD:
        for step in tl.static_range(0, PART_FEATURES // BLOCK_K):
            w = _load_rows(
                w_rows, is_column, step * BLOCK_K, FEATURES, BLOCK_K, PARTS, PART_FEATURES, True
            )
            weights = weights + (w,)  # type: ignore[assignment]  # noqa: RUF005  Triton cannot unpack
    return weights


@triton.jit
def _add_parts(acc, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add the accumulators of neighbouring parts until one is left: the same tree everywhere."""
    sums = tl.permute(acc, (1, 2, 0))
    if PARTS >= 8:
        even, odd = tl.split(tl.reshape(sums, (BLOCK_M, BLOCK_N, 4, 2)))
        sums = even + odd
    if PARTS >= 4:
        even, odd = tl.split(tl.reshape(sums, (BLOCK_M, BLOCK_N, 2, 2)))
        sums = even + odd
    even, odd = tl.split(sums)
    return even + odd


@triton.jit
def _sum_part(
    x_rows, w_rows, is_row, is_column, PART: tl.constexpr,
    FEATURES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PART_FEATURES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum one part of K in steps of BLOCK_K; the last parts may have fewer steps, or none."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    end = min((PART + 1) * PART_FEATURES, FEATURES)
    for k in tl.range(PART * PART_FEATURES, end, BLOCK_K, num_stages=STAGES):
        x = _load_rows(x_rows, is_row, k, FEATURES, BLOCK_K, 1, PART_FEATURES, False)
        w = _load_rows(w_rows, is_column, k, FEATURES, BLOCK_K, 1, PART_FEATURES, True)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit
def sum_parts_in_turn(
    x_rows, w_rows, is_row, is_column,
    FEATURES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, PART_FEATURES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum the parts of K one after the other and add them as `_add_parts` does.

    Many rows keep the multiprocessors busy without parts beside each other.
    """
    sums = _sum_part(
        x_rows, w_rows, is_row, is_column, 0,
        FEATURES, BLOCK_M, BLOCK_N, BLOCK_K, PART_FEATURES, STAGES,
    )  # fmt: skip
    if PARTS >= 2:
        sums += _sum_part(
            x_rows, w_rows, is_row, is_column, 1,
            FEATURES, BLOCK_M, BLOCK_N, BLOCK_K, PART_FEATURES, STAGES,
        )  # fmt: skip
    for pair in tl.static_range(2, PARTS, 2):
        low = _sum_part(
            x_rows, w_rows, is_row, is_column, pair,
            FEATURES, BLOCK_M, BLOCK_N, BLOCK_K, PART_FEATURES, STAGES,
        )  # fmt: skip
        low += _sum_part(
            x_rows, w_rows, is_row, is_column, pair + 1,
            FEATURES, BLOCK_M, BLOCK_N, BLOCK_K, PART_FEATURES, STAGES,
        )  # fmt: skip
        if pair == 4:  # the second half of eight parts has a sum of its own
            quarter = low
        elif pair == 6:
            sums += quarter + low
        else:
            sums += low
    return sums


@triton.jit
def sum_products(
    x_rows, w_rows, weights, is_row, is_column,
    FEATURES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, PART_FEATURES: tl.constexpr, STAGES: tl.constexpr, PRELOAD: tl.constexpr,
    IN_TURN: tl.constexpr,
):  # fmt: skip
    """Sum x @ w.T over K in steps of BLOCK_K, in one accumulator for each part.

    Pointers and masks are [M, 1] for rows and [1, N] for weights, `weights` from `early_weights`.
    """
    if IN_TURN:
        return sum_parts_in_turn(
            x_rows, w_rows, is_row, is_column, FEATURES, BLOCK_M, BLOCK_N, BLOCK_K, PARTS,
            PART_FEATURES, STAGES,
        )  # fmt: skip
    if PARTS == 1:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    else:
        acc = tl.zeros((PARTS, BLOCK_M, BLOCK_N), dtype=tl.float32)
    if PRELOAD:
        rows = ()
        for step in tl.static_range(0, PART_FEATURES // BLOCK_K):
            x = _load_rows(
                x_rows, is_row, step * BLOCK_K, FEATURES, BLOCK_K, PARTS, PART_FEATURES, False
            )
            rows = rows + (x,)  # type: ignore[assignment]  # noqa: RUF005  Triton cannot unpack
        for step in tl.static_range(0, PART_FEATURES // BLOCK_K):
            acc = tl.dot(rows[step], weights[step], acc, input_precision="ieee")
    else:
        for k in tl.range(0, PART_FEATURES, BLOCK_K, num_stages=STAGES):
            x = _load_rows(x_rows, is_row, k, FEATURES, BLOCK_K, PARTS, PART_FEATURES, False)
            w = _load_rows(w_rows, is_column, k, FEATURES, BLOCK_K, PARTS, PART_FEATURES, True)
            acc = tl.dot(x, w, acc, input_precision="ieee")
    if PARTS > 1:
        acc = _add_parts(acc, PARTS, BLOCK_M, BLOCK_N)
    return acc
