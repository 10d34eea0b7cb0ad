"""What `runtime.kernels.aot` compiles of prompt lookup, which runs without a draft model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.config.values import DEFAULT_MAX_NGRAM
from runtime.kernels.aot_cases import KernelCase
from runtime.kernels.cuda import ngram

_NUM_DRAFTS = 8


def lookup_cases() -> tuple[KernelCase, ...]:
    """Return one case of each kernel; they read integers, so models and dtypes make no other."""
    return (
        _case(
            ngram.find_drafts_kernel,
            ngram.find_constants(_NUM_DRAFTS, DEFAULT_MAX_NGRAM),
            num_warps=ngram.FIND_WARPS,
        ),
        _case(ngram.append_history_kernel, ngram.append_constants(_NUM_DRAFTS + 1), num_warps=1),
    )


def _case(kernel: Any, constants: Mapping[str, int], *, num_warps: int) -> KernelCase:
    return KernelCase(
        kernel=kernel,
        dtype="bf16",
        out_dtype="bf16",
        constants=tuple(constants.items()),
        num_warps=num_warps,
        num_stages=3,
        is_hot=True,
    )
