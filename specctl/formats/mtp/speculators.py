"""Speculators mtp: `mtp_layers.0.` names, the target's embedding and head."""

from __future__ import annotations

from specctl.checkpoint import Checkpoint
from specctl.draft import DraftCheckpoint
from specctl.formats.eagle.eagle3 import IGNORED_KEYS
from specctl.formats.fields import Findings, root_fields
from specctl.formats.mtp.layer import read_mtp, refuse_several_layers
from specctl.formats.names import Name, NameTable, at_layer, layer_names
from specctl.formats.speculators import layer_fields, read_token_count

_PREFIX = "mtp_layers.0."

NAMES = NameTable(
    names=(
        Name(role="embedding", keys=("embed_tokens.weight",)),
        Name(role="head", keys=("lm_head.weight",)),
        Name(role="fc.weight", keys=(_PREFIX + "input_proj.weight",)),
        Name(role="embedding_norm", keys=(_PREFIX + "token_layernorm.weight",)),
        Name(role="hidden_norm", keys=(_PREFIX + "hidden_layernorm.weight",)),
        Name(role="norm", keys=(_PREFIX + "final_layernorm.weight",)),
        *at_layer(layer_names(_PREFIX), 0),
    ),
    ignored=IGNORED_KEYS,
)


def read(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft; every defect is in its diagnostics."""
    root = root_fields(checkpoint.config, Findings())
    layers, family = layer_fields(root, absent_model_type="qwen2")
    tokens = read_token_count(root, "mtp")
    refuse_several_layers(root, 1)
    return read_mtp(
        checkpoint,
        format="speculators-mtp",
        names=NAMES,
        root=root,
        layers=layers,
        family=family,
        num_speculative_tokens=tokens,
        target_num_layers=None,
    )
