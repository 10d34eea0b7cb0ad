"""DeepSpec EAGLE-3: a Qwen3 config with `target_layer_ids`, `layers.` names, the full vocabulary.

Every layer, not only the first, reads (embedding, state). Embedding and head are copies of the
target's and stored.

Foreign convention undone: `target_layer_ids` counts outputs, -1 is the embedding; it is canonical.
*Source:* deepseek-ai/DeepSpec `deepspec/modeling/eagle3` (`Qwen3Eagle3Model`).
"""

from __future__ import annotations

from specctl.checkpoint import Checkpoint
from specctl.contract.file_names import CONFIG
from specctl.draft import DraftCheckpoint
from specctl.formats.aux_layers import read_output_ids
from specctl.formats.eagle.eagle3 import SPECULATORS_NAMES as FLAT_NAMES
from specctl.formats.eagle.eagle3 import Dialect, read_eagle3, read_norm_flags
from specctl.formats.eagle.roles import DEEPSPEC_ROLES
from specctl.formats.fields import ReaderFindings, root_fields
from specctl.formats.model_types import flat_layers
from specctl.formats.names import IGNORED_KEYS, Name, NameTable
from specctl.formats.speculators import report_gamma_missing

NAMES = NameTable(
    names=(
        Name(role="layers.{i}.hidden_norm", keys=("layers.{i}.hidden_norm.weight",)),
        *(
            row
            for row in FLAT_NAMES.names
            if row.role != "layers.0.hidden_norm" and not row.keys[0].startswith("midlayer.")
        ),
    ),
    ignored=IGNORED_KEYS,
)
DIALECT = Dialect(
    format="deepspec-eagle3", names=NAMES, roles=DEEPSPEC_ROLES, is_every_layer_wide=True
)


def read(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft; every defect is in its diagnostics."""
    root = root_fields(checkpoint.config, ReaderFindings())
    layers, family = flat_layers(root, absent_model_type="qwen3")
    report_gamma_missing(root, CONFIG)
    root.integer("draft_num_hidden_layers")
    root.findings.derived(
        "draft.has_norm_before_residual",
        "config.json#/architectures/0",
        "DeepSpec adds the state before its norm to the residual",
    )
    return read_eagle3(
        checkpoint,
        DIALECT,
        root=root,
        layers=layers,
        family=family,
        aux=read_output_ids(root, "target_layer_ids"),
        num_speculative_tokens=None,
        flags=read_norm_flags(root, has_norm_before_residual=False),
        target_num_layers=root.integer("num_target_layers", "draft.target_num_layers"),
    )
