"""Write EAGLE-3 and P-EAGLE as Speculators 0.9.

Foreign conventions restored: captured layers are boundaries (output id + 1); embedding and head are
stored, because the loader leaves a missing embedding at zero without a word; `mask_hidden` is
[1, 1, A*Ht]. A map keeps its order: the loader takes any.
*Source:* Speculators 0.9 `Eagle3DraftModel`, `PEagleDraftModel` and their configs.
"""

from __future__ import annotations

from typing import Any

from specctl.draft import DraftCheckpoint
from specctl.formats.aux_layers import AUX_KEY
from specctl.formats.eagle.eagle3 import SPECULATORS_NAMES
from specctl.formats.eagle.peagle import MASK_KEY
from specctl.formats.eagle.write_flat import no_mask
from specctl.formats.eagle.write_problems import (
    common_problems,
    library_problems,
    missing_parts,
)
from specctl.formats.writing import (
    SHARED_KEYS,
    SPECULATORS_VERSION,
    VOCABULARY_ROLES,
    add_shared,
    dtype_config,
    layer_config,
    map_tensors,
    named_tensors,
    speculators_problems,
    speculators_section,
)
from specctl.formats.writing_quantized import carrying
from specctl.formats.written import Copy, TensorSource, WriteRequest, Written, nothing


@carrying
def write_eagle3(request: WriteRequest) -> Written:
    """Return the draft as a Speculators eagle3 checkpoint.

    Diagnostics: SD602 without a token count, a target's name, an embedding or decided layer ids,
    and for what the library's classes cannot hold; SD601 `library-load`.
    """
    return _write(request, kind="eagle3", architecture="Eagle3Speculator")


@carrying
def write_peagle(request: WriteRequest) -> Written:
    """Return a parallel draft as a Speculators peagle checkpoint; diagnostics as `write_eagle3`."""
    draft = request.draft
    mask = draft.tensors.get("mask_hidden")
    if mask is None or draft.mask_token_id is None:
        return nothing(no_mask(draft))
    written = _write(request, kind="peagle", architecture="PEagleSpeculator")
    if not written.config:
        return written
    width = mask.shape[-1] if mask.shape else 0
    tensors: dict[str, TensorSource] = {
        **written.tensors,
        MASK_KEY: Copy(ref=mask, shape=(1, 1, width)),
    }
    config = {**written.config, "mask_token_id": draft.mask_token_id}
    return Written(config=config, tensors=tensors, diagnostics=written.diagnostics)


def _write(request: WriteRequest, *, kind: str, architecture: str) -> Written:
    draft, decoder = request.draft, request.draft.decoder
    problems = [
        *common_problems(draft),
        *missing_parts(draft),
        *library_problems(draft),
        *speculators_problems(request),
    ]
    if decoder is None or draft.geometry is None:
        return nothing(*problems)
    tensors = named_tensors(
        draft, SPECULATORS_NAMES, without=(*VOCABULARY_ROLES, "embedding", "head")
    )
    problems += add_shared(request, tensors, *SHARED_KEYS)
    config: dict[str, Any] = {
        "architectures": [architecture],
        **_facts(draft),
        "speculators_config": speculators_section(
            request, algorithm=kind, num_tokens=draft.geometry.num_speculative_tokens
        ),
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "tie_word_embeddings": False,
        **dtype_config(draft),
        "transformer_layer_config": layer_config(draft, decoder),
    }
    return Written(config=config, tensors=tensors | map_tensors(draft), diagnostics=tuple(problems))


def _facts(draft: DraftCheckpoint) -> dict[str, Any]:
    ids = draft.aux_layer_ids
    is_same_width = draft.hidden_size == draft.target_hidden_size
    return {
        "draft_vocab_size": draft.draft_vocab_size,
        AUX_KEY: None if ids is None else [index + 1 for index in ids],
        "fc_norm": draft.has_fc_norm,
        "norm_before_fc": draft.has_norm_before_fc,
        "norm_before_residual": draft.has_norm_before_residual,
        "norm_output": draft.has_norm_output,
        "target_hidden_size": None if is_same_width else draft.target_hidden_size,
    }
