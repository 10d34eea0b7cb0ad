"""Start-up check that products and attention keep a row's bits whatever rows are beside it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from runtime.config import RuntimeConfig
from runtime.kernels import RowInvariance, attention_invariance_probe, row_invariance_probe
from runtime.loading import LoadedModels
from runtime.models import TargetModel
from specctl.contract.diagnostics import Diagnostic, Severity, diagnose


def invariance_problems(models: LoadedModels, config: RuntimeConfig) -> tuple[Diagnostic, ...]:
    """Return SD831 findings: errors where drafts are verified, else warnings.

    CUDA products have pinned tiles and tests of their own; the CPU's library is what varies.
    """
    if config.device.type != "cpu":
        return ()
    severity: Severity = "error" if config.num_speculative_tokens else "warning"
    return row_invariance_problems(models.target, severity=severity)


def row_invariance_problems(
    target: TargetModel, *, severity: Severity = "error"
) -> tuple[Diagnostic, ...]:
    """Probe one weight and one attention of each distinct shape; SD831 for each that fails.

    The target alone decides tokens, so the draft is not probed.
    """
    return tuple(
        diagnose(
            "SD831",
            severity=severity,
            where=f"{target.device}: torch {torch.__version__}",
            message=f"{found.product} gives a row other bits beside other rows",
            expected="equal bits",
            found=f"differences up to {found.largest_difference:.3g}",
        )
        for found in (*_probe_products(target), *_probe_attention(target))
        if not found.is_invariant
    )


def _probe_products(target: TargetModel) -> Iterator[RowInvariance]:
    for weight in {weight.shape: weight for weight in _layer_weights(target)}.values():
        yield row_invariance_probe(weight)
    yield row_invariance_probe(target.reachable_head, is_head=True)


def _layer_weights(target: TargetModel) -> Iterator[torch.Tensor]:
    for layer in target.layers:
        yield layer.attention.qkv_weight
        yield layer.attention.o_weight
        yield layer.mlp.gate_up_weight
        yield layer.mlp.down_weight


def _probe_attention(target: TargetModel) -> Iterator[RowInvariance]:
    parts = (layer.attention for layer in target.layers)
    shapes = dict.fromkeys((part.num_heads, part.num_kv_heads, part.head_dim) for part in parts)
    for num_heads, num_kv_heads, head_dim in shapes:
        yield attention_invariance_probe(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=target.dtype,
            device=target.device,
        )
