"""Layers that target families and drafts share: frozen holders of tensors with a `forward`."""

from __future__ import annotations

from runtime.models.layers.attention import Attention
from runtime.models.layers.decoder_layer import DecoderLayer, enter_norm
from runtime.models.layers.mlp import MLP
from runtime.models.layers.roles import TensorSource, layer_shapes
from runtime.models.layers.rope import rope_problems, rope_table

__all__ = [
    "MLP",
    "Attention",
    "DecoderLayer",
    "TensorSource",
    "enter_norm",
    "layer_shapes",
    "rope_problems",
    "rope_table",
]
