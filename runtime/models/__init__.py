"""Target families and draft models: tensors plus a `forward`, built whole from manifest facts."""

from __future__ import annotations

from runtime.models.block import BlockModel, BlockRows, block_problems
from runtime.models.chain import ChainDraft, DraftHidden
from runtime.models.eagle1 import Eagle1Model
from runtime.models.eagle3 import Eagle3Model, eagle3_problems
from runtime.models.layers import (
    block_shapes,
    eagle1_shapes,
    eagle3_shapes,
    mtp_shapes,
    peagle_shapes,
    target_shapes,
)
from runtime.models.mtp import MtpModel
from runtime.models.peagle import PEagleModel
from runtime.models.staged import StagedTarget
from runtime.models.support import last_state_problems
from runtime.models.target import StageStates, TargetModel, TargetOutput, target_problems
from runtime.models.vocabulary import VocabEmbedding, VocabHead, pick_rows, rank_rows

DraftModel = Eagle1Model | Eagle3Model | PEagleModel | MtpModel | BlockModel
"""Any draft that a manifest can load to."""

__all__ = [
    "BlockModel",
    "BlockRows",
    "ChainDraft",
    "DraftHidden",
    "DraftModel",
    "Eagle1Model",
    "Eagle3Model",
    "MtpModel",
    "PEagleModel",
    "StageStates",
    "StagedTarget",
    "TargetModel",
    "TargetOutput",
    "VocabEmbedding",
    "VocabHead",
    "block_problems",
    "block_shapes",
    "eagle1_shapes",
    "eagle3_problems",
    "eagle3_shapes",
    "last_state_problems",
    "mtp_shapes",
    "peagle_shapes",
    "pick_rows",
    "rank_rows",
    "target_problems",
    "target_shapes",
]
