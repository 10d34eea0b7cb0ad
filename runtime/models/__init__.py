"""Target families and draft models: tensors plus a `forward`, built whole from manifest facts."""

from __future__ import annotations

from runtime.models.chain import ChainDraft, DraftHidden
from runtime.models.eagle3 import Eagle3Model, eagle3_problems
from runtime.models.layers import eagle3_shapes, mtp_shapes, target_shapes
from runtime.models.mtp import MtpModel, mtp_problems
from runtime.models.target import TargetModel, TargetOutput, target_problems

DraftModel = Eagle3Model | MtpModel
"""Any draft that a manifest can load to."""

__all__ = [
    "ChainDraft",
    "DraftHidden",
    "DraftModel",
    "Eagle3Model",
    "MtpModel",
    "TargetModel",
    "TargetOutput",
    "eagle3_problems",
    "eagle3_shapes",
    "mtp_problems",
    "mtp_shapes",
    "target_problems",
    "target_shapes",
]
