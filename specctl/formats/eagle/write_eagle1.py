"""Write EAGLE-1 in SafeAILab's layout and as the old Speculators type.

Foreign conventions restored: `bias` is always stated, because the reference reads an absent one as
true; Speculators' type stores neither embedding nor head.
*Source:* SafeAILab/EAGLE `cnets1.py`; Speculators 0.6 `EagleSpeculatorConfig` and its converter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specctl.contract.diagnostics import Diagnostic
from specctl.contract.file_names import CONFIG
from specctl.draft import DraftCheckpoint
from specctl.formats.eagle.eagle1 import NAMES, SPECULATORS_NAMES
from specctl.formats.eagle.write_problems import no_place, reference_rope
from specctl.formats.writing import (
    dtype_config,
    layer_config,
    named_tensors,
    speculators_problems,
    speculators_section,
)
from specctl.formats.writing_quantized import carrying
from specctl.formats.written import WriteRequest, Written, lost, nothing, unable

LAST_VERSION = "0.6.0"
"""The last release of Speculators that has the type `eagle`."""
_NORMS = ("layers.0.input_norm", "norm")


@carrying
def write_native(request: WriteRequest) -> Written:
    """Return the draft with a flat config; a copy of the target's head is left out (SD601)."""
    draft, decoder = request.draft, request.draft.decoder
    problems = [*_problems(draft), *_left_out(draft, "head")]
    if decoder is None:
        return nothing(*problems)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        **layer_config(draft, decoder),
        **dtype_config(draft),
        "bias": draft.has_fc_bias,
        **reference_rope(decoder.rope),
    }
    return Written(
        config=config,
        tensors=named_tensors(draft, NAMES, without=("head",)),
        diagnostics=tuple(problems),
    )


@carrying
def write_speculators(request: WriteRequest) -> Written:
    """Return the draft as Speculators' type `eagle`.

    Diagnostics: SD601 `embedding` and `head` for copies that the type does not store; SD602 without
    a token count or a target's name, and for more than one layer.
    """
    draft, decoder = request.draft, request.draft.decoder
    problems = [
        *_problems(draft),
        *_left_out(draft, "embedding", "head"),
        *speculators_problems(request),
    ]
    if decoder is None or draft.geometry is None:
        return nothing(*problems)
    if decoder.num_layers > 1:
        problems.append(
            no_place(draft, "layers.1.q_proj.weight", "the type has one layer, `transformer`")
        )
    config: dict[str, Any] = {
        "architectures": ["EagleSpeculator"],
        "fusion_bias": draft.has_fc_bias,
        "layernorms": draft.details.get("layernorms") is True,
        "speculators_config": speculators_section(
            request, algorithm="eagle", num_tokens=draft.geometry.num_speculative_tokens
        ),
        "speculators_model_type": "eagle",
        "speculators_version": LAST_VERSION,
        **dtype_config(draft),
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": layer_config(draft, decoder),
    }
    return Written(
        config=config,
        tensors=named_tensors(draft, SPECULATORS_NAMES, without=("embedding", "head")),
        diagnostics=tuple(problems),
    )


def _problems(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    if draft.decoder is None:
        yield unable(
            where=CONFIG,
            message="a dimension of the layer is not known",
            expected="dense layers of the llama family",
            found=draft.architecture or "unknown",
        )
    if draft.details.get("layernorms") is True:
        return
    for role in _NORMS:
        if role in draft.tensors:
            yield no_place(draft, role, "a norm is stored that the draft's flags do not use")


def _left_out(draft: DraftCheckpoint, *roles: str) -> Iterator[Diagnostic]:
    for role in roles:
        ref = draft.tensors.get(role)
        if ref is not None:
            yield lost(
                role,
                where=f"{ref.file}::{ref.key}",
                message=f"`{ref.key}` has no place in this dialect",
                found=ref.key,
            )
