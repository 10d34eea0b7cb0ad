"""Layers that target families and drafts share: frozen holders of tensors with a `forward`."""

from __future__ import annotations

from runtime.models.layers.attention import Attention
from runtime.models.layers.decoder_layer import DecoderLayer
from runtime.models.layers.mlp import MLP
from runtime.models.layers.ranked import SPLIT_COLUMNS, SPLIT_ROWS
from runtime.models.layers.roles import (
    Shapes,
    TensorSource,
    block_shapes,
    eagle1_shapes,
    eagle3_shapes,
    layer_source,
    mtp_shapes,
    peagle_shapes,
    target_shapes,
)
from runtime.models.layers.rope import decoder_rope_table, rope_problems, rope_table

__all__ = [
    "MLP",
    "SPLIT_COLUMNS",
    "SPLIT_ROWS",
    "Attention",
    "DecoderLayer",
    "Shapes",
    "TensorSource",
    "block_shapes",
    "decoder_rope_table",
    "eagle1_shapes",
    "eagle3_shapes",
    "layer_source",
    "mtp_shapes",
    "peagle_shapes",
    "rope_problems",
    "rope_table",
    "target_shapes",
]
