"""An MTP layer in DeepSeek's key layout: `model.layers.{N}.` after a target of N layers.

Foreign conventions undone: the layer's index is the target's layer count, and becomes layer 0 here;
`num_hidden_layers` in the config is the target's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from specctl.checkpoint import Checkpoint
from specctl.draft import DraftCheckpoint
from specctl.formats.assemble import is_whole
from specctl.formats.decoder import report_layer_count
from specctl.formats.eagle.eagle3 import IGNORED_KEYS
from specctl.formats.fields import CONFIG, Findings, root_fields
from specctl.formats.model_types import flat_layers
from specctl.formats.mtp.layer import COUNT_KEY, read_mtp, refuse_several_layers
from specctl.formats.names import Name, NameTable, at_layer, layer_names
from specctl.formats.speculators import report_gamma_missing

_FUSE_KEY = re.compile(r"model\.layers\.(\d+)\.eh_proj\.weight")


def layer_indexes(keys: Iterable[str]) -> tuple[int, ...]:
    """Return the indexes of the layers that hold an `eh_proj`, ascending."""
    found = (_FUSE_KEY.fullmatch(key) for key in keys)
    return tuple(sorted(int(match[1]) for match in found if match))


def names_at(index: int) -> NameTable:
    """Return the name table of a layer stored at `model.layers.{index}.`."""
    prefix = f"model.layers.{index}."
    return NameTable(
        names=(
            Name(
                role="embedding", keys=(prefix + "embed_tokens.weight", "model.embed_tokens.weight")
            ),
            Name(role="head", keys=(prefix + "shared_head.head.weight", "lm_head.weight")),
            Name(role="fc.weight", keys=(prefix + "eh_proj.weight",)),
            Name(role="embedding_norm", keys=(prefix + "enorm.weight",)),
            Name(role="hidden_norm", keys=(prefix + "hnorm.weight",)),
            Name(role="norm", keys=(prefix + "shared_head.norm.weight",)),
            *at_layer(layer_names(prefix), 0),
        ),
        ignored=IGNORED_KEYS,
    )


def read(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft; every defect is in its diagnostics."""
    checkpoint = _own_layers(checkpoint)
    root = root_fields(checkpoint.config, Findings())
    layers, family = flat_layers(root, absent_model_type="llama")
    report_gamma_missing(root, CONFIG)
    indexes = layer_indexes(checkpoint.tensors)
    refuse_several_layers(root, len(indexes))
    stated = root.integer("num_hidden_layers", minimum=0)
    index = indexes[0] if indexes else stated
    if index is not None and is_whole(checkpoint):
        report_layer_count(root, index)
        report_layer_count(root, len(indexes), COUNT_KEY)
    return read_mtp(
        checkpoint,
        format="deepseek-mtp",
        names=names_at(index or 0),
        root=root,
        layers=layers,
        family=family,
        num_speculative_tokens=None,
        target_num_layers=index,
    )


def _own_layers(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint without the target that the prediction layers are bundled with."""
    prefixes = tuple(f"model.layers.{index}." for index in layer_indexes(checkpoint.tensors))
    own = {key: entry for key, entry in checkpoint.tensors.items() if key.startswith(prefixes)}
    trunk = (key for key in checkpoint.tensors if key.startswith("model.layers."))
    has_trunk = any(key not in own for key in trunk)
    return replace(checkpoint, tensors=own) if has_trunk else checkpoint
