"""Start-up check that matrix products keep a row's bits whatever rows are beside it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from runtime.kernels import row_invariance_probe
from runtime.models import TargetModel
from specctl.contract.diagnostics import Diagnostic, Severity, diagnose


def row_invariance_problems(
    target: TargetModel, *, severity: Severity = "error"
) -> tuple[Diagnostic, ...]:
    """Probe one weight of each distinct shape; SD831 for each that breaks the contract.

    The target alone decides tokens, so the draft is not probed.
    """
    probed: set[tuple[torch.Size, torch.dtype | None]] = set()
    problems = []
    for weight, out_dtype in _products(target):
        if (weight.shape, out_dtype) in probed:
            continue
        probed.add((weight.shape, out_dtype))
        found = row_invariance_probe(weight, out_dtype=out_dtype)
        if not found.is_invariant:
            problems.append(
                diagnose(
                    "SD831",
                    severity=severity,
                    where=f"{target.device}: torch {torch.__version__}",
                    message=(
                        f"a {found.dtype} product of {found.out_features} x {found.in_features} "
                        f"gives a row other bits beside other rows"
                    ),
                    expected="equal bits",
                    found=f"differences up to {found.largest_difference:.3g}",
                )
            )
    return tuple(problems)


def _products(target: TargetModel) -> Iterator[tuple[torch.Tensor, torch.dtype | None]]:
    """Yield every matrix of the target with the dtype that its product is asked for."""
    for layer in target.layers:
        yield layer.attention.qkv_weight, None
        yield layer.attention.o_weight, None
        yield layer.mlp.gate_up_weight, None
        yield layer.mlp.down_weight, None
    yield target.head_VD, torch.float32
