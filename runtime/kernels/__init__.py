"""Row-invariant kernels: each op has a Triton kernel and a plain-torch twin.

A public op picks by device: CUDA tensors go to `runtime.kernels.cuda`, all others to the twin,
which is both the CPU path and the oracle of the tests. Importing this package needs torch only.
"""

from runtime.kernels.accept import accept
from runtime.kernels.activation import silu_and_mul
from runtime.kernels.attention import attend_new_rows, paged_attention
from runtime.kernels.corrected import corrected_argmax
from runtime.kernels.embedding import embed
from runtime.kernels.fused_linear import interleave, residual_linear, scaled_linear
from runtime.kernels.head import HeadRows, head_argmax, head_logits, logits_argmax, plain_rows
from runtime.kernels.head_rows import NamedRows, head_rows_argmax, joint_head_argmax
from runtime.kernels.joined_linear import RowHalf, joined_linear
from runtime.kernels.kv_write import write_kv
from runtime.kernels.linear import linear
from runtime.kernels.norm import HeadNorms, RowNorm, head_rms_norm, rms_norm
from runtime.kernels.own_ids import keep_own_ids
from runtime.kernels.probe import (
    RowInvariance,
    attention_invariance_probe,
    row_invariance_probe,
)
from runtime.kernels.rope import apply_rope
from runtime.kernels.row_copies import keep_rows, side_by_side, take_rows
from runtime.kernels.stream import Stream, embed_stream, enter_stream

__all__ = [
    "HeadNorms",
    "HeadRows",
    "NamedRows",
    "RowHalf",
    "RowInvariance",
    "RowNorm",
    "Stream",
    "accept",
    "apply_rope",
    "attend_new_rows",
    "attention_invariance_probe",
    "corrected_argmax",
    "embed",
    "embed_stream",
    "enter_stream",
    "head_argmax",
    "head_logits",
    "head_rms_norm",
    "head_rows_argmax",
    "interleave",
    "joined_linear",
    "joint_head_argmax",
    "keep_own_ids",
    "keep_rows",
    "linear",
    "logits_argmax",
    "paged_attention",
    "plain_rows",
    "residual_linear",
    "rms_norm",
    "row_invariance_probe",
    "scaled_linear",
    "side_by_side",
    "silu_and_mul",
    "take_rows",
    "write_kv",
]
