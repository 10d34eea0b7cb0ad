"""Target families and draft models: tensors plus a `forward`, built whole from manifest facts."""

from __future__ import annotations

from runtime.models.eagle3 import DraftHidden, Eagle3Model, eagle3_problems
from runtime.models.layers import eagle3_shapes, target_shapes
from runtime.models.target import TargetModel, TargetOutput, target_problems

__all__ = [
    "DraftHidden",
    "Eagle3Model",
    "TargetModel",
    "TargetOutput",
    "eagle3_problems",
    "eagle3_shapes",
    "target_problems",
    "target_shapes",
]
