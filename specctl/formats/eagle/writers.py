"""Write EAGLE-3 in its flat dialects and as Speculators.

Foreign conventions restored: Speculators counts boundaries (output id + 1) and stores embedding and
head, because its loader fills a missing embedding with zeros; SpecForge and ModelOpt count outputs,
which readers recognise by a first id of 1 only; SafeAILab has no field and captures boundaries
[2, n//2, n-3]. SafeAILab and SpecForge have one layer, `midlayer.`.
*Source:* Speculators 0.9 `Eagle3SpeculatorConfig`; SpecForge and Model-Optimizer export; SGLang
pull request 25454 for how a list is told apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specctl.contract.diagnostics import Diagnostic
from specctl.contract.manifest import Decoder
from specctl.draft import DraftCheckpoint
from specctl.formats.aux_layers import default_boundaries, to_canonical
from specctl.formats.eagle.eagle3 import SAFEAILAB_NAMES, SPECULATORS_NAMES
from specctl.formats.fields import CONFIG
from specctl.formats.names import NameTable
from specctl.formats.writing import (
    SPECULATORS_VERSION,
    VOCABULARY_ROLES,
    dtype_config,
    layer_config,
    map_tensors,
    named_tensors,
    own_or_target,
    speculators_problems,
    speculators_section,
)
from specctl.formats.written import TensorSource, WriteRequest, Written, lost, unable

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
FLAT_ARCHITECTURE = "LlamaForCausalLMEagle3"
_NECESSARY = ("fc.weight", "norm", "layers.0.input_norm", "layers.0.hidden_norm")


def write_speculators(request: WriteRequest) -> Written:
    """Return the draft as a Speculators eagle3 checkpoint.

    Diagnostics: SD602 without a token count, a target's name, an embedding or decided layer ids,
    and for an `fc` with bias.
    """
    draft, decoder = request.draft, request.draft.decoder
    if decoder is None or draft.geometry is None:
        return _nothing(*_common_problems(draft), *speculators_problems(request))
    problems = [*_common_problems(draft), *speculators_problems(request)]
    if draft.has_fc_bias:
        problems.append(_no_place(draft, "fc.bias", "Speculators' `fc` has no bias"))
    tensors = named_tensors(
        draft, SPECULATORS_NAMES, without=(*VOCABULARY_ROLES, "embedding", "head")
    )
    for role, key in (("embedding", "embed_tokens.weight"), ("head", "lm_head.weight")):
        found = own_or_target(request, role)
        if isinstance(found, Diagnostic):
            problems.append(found)
        else:
            tensors[key] = found
    ids = draft.aux_layer_ids
    layers = layer_config(draft, decoder)
    config = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": draft.draft_vocab_size,
        AUX_KEY: None if ids is None else [index + 1 for index in ids],
        "fc_norm": draft.has_fc_norm,
        "norm_before_fc": draft.has_norm_before_fc,
        "norm_before_residual": draft.has_norm_before_residual,
        "norm_output": draft.has_norm_output,
        "speculators_config": speculators_section(
            request, algorithm="eagle3", num_tokens=draft.geometry.num_speculative_tokens
        ),
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": draft.target_hidden_size,
        "tie_word_embeddings": False,
        **dtype_config(draft),
        "transformer_layer_config": layers,
    }
    return Written(config=config, tensors=tensors | map_tensors(draft), diagnostics=tuple(problems))


def write_safeailab(request: WriteRequest) -> Written:
    """Return the draft with a flat config and `midlayer.` names.

    Diagnostics: SD601 `aux-layer-ids` when the captured layers are not the format's default, SD602
    without a target to compare them with, and for more than one layer.
    """
    draft, decoder = request.draft, request.draft.decoder
    if decoder is None:
        return _nothing(*_common_problems(draft))
    problems = [*_common_problems(draft), *_one_layer(draft), *_default_layers(request)]
    config = _flat_config(request, decoder, architecture="LlamaForCausalLM")
    return _flat(draft, config, SAFEAILAB_NAMES, problems, with_mask=True)


def write_specforge(request: WriteRequest) -> Written:
    """Return the draft with a flat config, `eagle_config` and `midlayer.` names; SD602."""
    return _with_output_ids(request, SAFEAILAB_NAMES, with_mask=True)


def write_modelopt(request: WriteRequest) -> Written:
    """Return the draft with a flat config, `eagle_config`, `layers.0.` names and no mask; SD602."""
    return _with_output_ids(request, SPECULATORS_NAMES, with_mask=False)


def _with_output_ids(request: WriteRequest, names: NameTable, *, with_mask: bool) -> Written:
    draft, decoder = request.draft, request.draft.decoder
    if decoder is None:
        return _nothing(*_common_problems(draft))
    problems = list(_common_problems(draft))
    if names is SAFEAILAB_NAMES:
        problems += _one_layer(draft)
    eagle: dict[str, Any] = {"use_aux_hidden_state": True}
    if not with_mask:
        eagle |= {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True}
    if draft.aux_layer_ids is not None:
        eagle[AUX_KEY] = list(draft.aux_layer_ids)
        if draft.aux_layer_ids[:1] != (1,):
            problems.append(
                unable(
                    where=f"{CONFIG}#/eagle_config/{AUX_KEY}",
                    message=f"the list {list(draft.aux_layer_ids)} counts outputs, and engines "
                    "read a list as outputs only when it begins with 1",
                    expected="a first id of 1",
                    found=draft.aux_layer_ids[0] if draft.aux_layer_ids else "an empty list",
                )
            )
    config = _flat_config(request, decoder, architecture=FLAT_ARCHITECTURE)
    config["eagle_config"] = dict(sorted(eagle.items()))
    return _flat(draft, config, names, problems, with_mask=with_mask)


def _flat(
    draft: DraftCheckpoint,
    config: dict[str, Any],
    names: NameTable,
    problems: list[Diagnostic],
    *,
    with_mask: bool,
) -> Written:
    tensors: dict[str, TensorSource] = named_tensors(draft, names)
    return Written(
        config=config,
        tensors=tensors | map_tensors(draft, with_mask=with_mask),
        diagnostics=tuple(problems),
    )


def _flat_config(request: WriteRequest, decoder: Decoder, *, architecture: str) -> dict[str, Any]:
    draft = request.draft
    config: dict[str, Any] = {
        "architectures": [architecture],
        **layer_config(draft, decoder),
        **dtype_config(draft),
        "draft_vocab_size": draft.draft_vocab_size,
        "norm_before_residual": draft.has_norm_before_residual,
        "target_hidden_size": draft.target_hidden_size,
    }
    flags = {
        "fc_norm": draft.has_fc_norm,
        "norm_before_fc": draft.has_norm_before_fc,
        "norm_output": draft.has_norm_output,
    }
    config |= {name: True for name, holds in flags.items() if holds}
    return config


def _common_problems(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    if draft.decoder is None:
        yield unable(
            where=CONFIG,
            message="the layers are of a kind that this dialect does not hold",
            expected="dense layers of the llama family",
            found=draft.architecture or "unknown",
        )
    for role in _NECESSARY:
        if role not in draft.tensors:
            yield unable(
                where=CONFIG,
                message=f"the dialect always has the tensor `{role}`, which this draft leaves out",
                expected=role,
                found="nothing",
            )
    if draft.declared_aux_ids is not None and draft.aux_layer_ids is None:
        yield unable(
            where=f"{CONFIG}#/{AUX_KEY}",
            message=f"ids {list(draft.declared_aux_ids)} do not say what they count",
            expected="--aux-numbering output or --aux-numbering boundary",
            found="undecided",
        )


def _one_layer(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    if draft.decoder is not None and draft.decoder.num_layers > 1:
        yield _no_place(draft, "layers.1.input_norm", "the dialect has one layer, `midlayer`")


def _no_place(draft: DraftCheckpoint, role: str, reason: str) -> Diagnostic:
    ref = draft.tensors.get(role)
    where = CONFIG if ref is None else f"{ref.file}::{ref.key}"
    return unable(where=where, message=reason, found="nothing" if ref is None else ref.key)


def _default_layers(request: WriteRequest) -> Iterator[Diagnostic]:
    """Report captured layers that a dialect without a field for them would lose."""
    ids, target = request.draft.aux_layer_ids, request.target
    if ids is None:
        return
    where = f"{CONFIG}#/{AUX_KEY}"
    if target is None or target.num_layers is None:
        yield unable(
            where=where,
            message="the dialect captures boundaries [2, n//2, n-3] of the target's n layers, and "
            "n is not known here",
            expected="--target TARGET",
            found="no target",
        )
    elif ids != to_canonical(default_boundaries(target.num_layers), "boundary"):
        yield lost(
            "aux-layer-ids",
            where=where,
            message=f"outputs {list(ids)} are captured, not the default of {target.num_layers} "
            "layers",
            found=list(ids),
        )


def _nothing(*problems: Diagnostic) -> Written:
    return Written(config={}, tensors={}, diagnostics=problems)
