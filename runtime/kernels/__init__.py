"""Row-invariant kernels: each op has a Triton kernel and a plain-torch twin.

A public op picks by device: CUDA tensors go to `runtime.kernels.cuda`, all others to the twin,
which is both the CPU path and the oracle of the tests. Importing this package needs torch only.
"""

from runtime.kernels.activation import silu_and_mul
from runtime.kernels.attention import paged_attention
from runtime.kernels.embedding import embed
from runtime.kernels.head import head_argmax, head_logits
from runtime.kernels.kv_write import write_kv
from runtime.kernels.linear import linear
from runtime.kernels.norm import add_rms_norm, head_rms_norm, rms_norm
from runtime.kernels.probe import (
    RowInvariance,
    attention_invariance_probe,
    row_invariance_probe,
)
from runtime.kernels.rope import apply_rope

__all__ = [
    "RowInvariance",
    "add_rms_norm",
    "apply_rope",
    "attention_invariance_probe",
    "embed",
    "head_argmax",
    "head_logits",
    "head_rms_norm",
    "linear",
    "paged_attention",
    "rms_norm",
    "row_invariance_probe",
    "silu_and_mul",
    "write_kv",
]
