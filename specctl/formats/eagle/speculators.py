"""Speculators eagle3: nested config, `layers.0.` names, captured layers as boundaries.

Foreign conventions undone: `eagle_aux_hidden_state_layer_ids` counts boundaries; an absent
`norm_before_residual` is false for the library and true for vLLM (SD311, read as false).
"""

from __future__ import annotations

from specctl.checkpoint import Checkpoint
from specctl.draft import DraftCheckpoint
from specctl.formats.aux_layers import AUX_KEY, read_boundary_ids
from specctl.formats.eagle.eagle3 import SPECULATORS_NAMES, Dialect, read_eagle3, read_norm_flags
from specctl.formats.fields import Fields, ReaderFindings, root_fields
from specctl.formats.speculators import layer_fields, read_token_count

DIALECT = Dialect(format="speculators-eagle3", names=SPECULATORS_NAMES, is_library=True)


def read(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft; every defect is in its diagnostics."""
    root = root_fields(checkpoint.config, ReaderFindings())
    layers, family = layer_fields(root, absent_model_type="qwen3")
    tokens = read_token_count(root, "eagle3")
    return read_eagle3(
        checkpoint,
        DIALECT,
        root=root,
        layers=layers,
        family=family,
        aux=read_boundary_ids(root, AUX_KEY, has_default=True),
        num_speculative_tokens=tokens,
        flags=read_norm_flags(root, has_norm_before_residual=_norm_before_residual(root)),
    )


def _norm_before_residual(root: Fields) -> bool:
    key, path = "norm_before_residual", "draft.has_norm_before_residual"
    value = root.flag(key, path)
    if value is None and not root.has(key):
        root.findings.derived(path, root.where(key), "Speculators class default (vLLM takes true)")
        root.findings.add(
            "SD311",
            where=root.where(key),
            message="`norm_before_residual` is absent: Speculators reads false, vLLM reads true",
            expected="true or false",
            found="nothing, read as false",
        )
    return bool(value)
