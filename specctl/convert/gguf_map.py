"""What a llama.cpp conversion needs beside the weights: the absolute map and the captured layers.

A JSON file, no checkpoint: `convert_hf_to_gguf.py` writes the weights, and this file is what its
result must agree with. Foreign conventions restored: GGUF stores `d2t` as absolute target ids in
draft-id order and has no mask; captured layers are boundaries (output id + 1).
*Source:* llama.cpp pull requests 18039 (EAGLE-3: three captured layers, one draft layer, always
[2, n/2, n-3]), 25173 and 26275 (DSpark under `dflash.*` keys).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specctl.contract.diagnostics import Diagnostic
from specctl.contract.file_names import CONFIG
from specctl.contract.vocabulary_map import map_digest
from specctl.draft import DraftCheckpoint, TargetCheckpoint
from specctl.formats.aux_layers import default_boundaries
from specctl.formats.written import lost, unable

SCHEMA = 1
_PREFIX = {"eagle3": "eagle3", "dflash": "dflash", "dspark": "dflash"}


def gguf_map(
    draft: DraftCheckpoint, target: TargetCheckpoint | None
) -> tuple[dict[str, Any], tuple[Diagnostic, ...]]:
    """Return the file's object and the findings.

    Diagnostics: SD602 for another algorithm, more than one EAGLE-3 layer and undecided layer ids;
    SD601 `t2d` for a stored mask and `aux-layer-ids` for layers that llama.cpp does not capture.
    """
    findings = tuple(_findings(draft, target))
    prefix = _PREFIX.get(draft.algorithm, "")
    ids, layers = draft.draft_to_target, draft.aux_layer_ids
    keys: dict[str, Any] = {
        f"{prefix}.target_hidden_size": draft.target_hidden_size,
        f"{prefix}.extract_layers": None if layers is None else [layer + 1 for layer in layers],
    }
    if draft.algorithm == "eagle3":
        keys[f"{prefix}.norm_before_residual"] = draft.has_norm_before_residual
    else:
        keys |= {
            f"{prefix}.block_size": draft.draft_block_size,
            f"{prefix}.mask_token_id": draft.mask_token_id,
            f"{prefix}.sample_from_anchor": draft.sample_from_anchor,
        }
    content = {
        "schema": SCHEMA,
        "architecture": prefix,
        "algorithm": draft.algorithm,
        "keys": keys,
        "target_vocab_size": draft.target_vocab_size,
        "draft_vocab_size": draft.draft_vocab_size,
        "d2t_absolute": None if ids is None or draft.map_kind != "reduced" else list(ids),
        "map_digest": None if ids is None or draft.map_kind != "reduced" else map_digest(ids),
    }
    return content, findings


def _findings(draft: DraftCheckpoint, target: TargetCheckpoint | None) -> Iterator[Diagnostic]:
    if draft.algorithm not in _PREFIX:
        yield unable(
            where=CONFIG,
            message=f"llama.cpp has no external draft of algorithm `{draft.algorithm}`",
            expected=", ".join(_PREFIX),
            found=draft.algorithm,
        )
        return
    if "t2d" in draft.tensors:
        ref = draft.tensors["t2d"]
        yield lost("t2d", where=f"{ref.file}::{ref.key}", message="GGUF has no mask", found=ref.key)
    if draft.aux_layer_ids is None and draft.declared_aux_ids is not None:
        yield unable(
            where=CONFIG,
            message=f"ids {list(draft.declared_aux_ids)} do not say what they count",
            expected="--aux-numbering output or --aux-numbering boundary",
            found="undecided",
        )
    if draft.algorithm == "eagle3":
        yield from _eagle3_limits(draft, target)


def _eagle3_limits(draft: DraftCheckpoint, target: TargetCheckpoint | None) -> Iterator[Diagnostic]:
    layers = 1 if draft.decoder is None else draft.decoder.num_layers
    if layers != 1 or (draft.num_aux_states or 3) != 3:
        yield unable(
            where=CONFIG,
            message="llama.cpp reads EAGLE-3 drafts of one layer over three captured states",
            expected="1 layer, 3 states",
            found=f"{layers} layers, {draft.num_aux_states} states",
        )
    depth = None if target is None else target.num_layers
    ids = draft.aux_layer_ids
    if ids is None or depth is None:
        return
    usual = default_boundaries(depth)
    boundaries = tuple(index + 1 for index in ids)
    if boundaries != usual:
        yield lost(
            "aux-layer-ids",
            where=CONFIG,
            message=f"llama.cpp captures boundaries {list(usual)} whatever the file says",
            found=list(boundaries),
        )
