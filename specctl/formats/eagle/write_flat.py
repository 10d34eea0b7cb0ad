"""Write EAGLE-3 and P-EAGLE with a flat config.

Foreign conventions restored: SpecForge, ModelOpt and NeMo count outputs, which readers recognise by
a first id of 1 only; SafeAILab has no field and captures boundaries [2, n//2, n-3]; the names of
the first layer are `midlayer.` (SafeAILab, SpecForge), `layers.0.` (ModelOpt, P-EAGLE) or inside a
module `model` (NeMo).
*Source:* SafeAILab/EAGLE `cnets.py`; SpecForge and Model-Optimizer export; NeMo Automodel
`LlamaEagle3DraftModel`; SGLang pull request 25454 for how a list is told apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from specctl.contract.diagnostics import Diagnostic
from specctl.contract.file_names import CONFIG
from specctl.contract.manifest import Decoder
from specctl.draft import DraftCheckpoint
from specctl.formats.aux_layers import (
    AUX_KEY,
    decide_numbering,
    default_boundaries,
    to_canonical,
)
from specctl.formats.eagle.eagle3 import NEMO_NAMES, SAFEAILAB_NAMES, SPECULATORS_NAMES
from specctl.formats.eagle.parallel_heads import is_head_role
from specctl.formats.eagle.peagle import MASK_KEY
from specctl.formats.eagle.write_problems import (
    common_problems,
    missing_parts,
    no_place,
    normed_residual,
    reference_rope,
    undeclared_parts,
)
from specctl.formats.names import NameTable
from specctl.formats.writing import (
    add_shared,
    dtype_config,
    layer_config,
    map_tensors,
    named_tensors,
)
from specctl.formats.writing_quantized import carrying
from specctl.formats.written import Copy, TensorSource, WriteRequest, Written, lost, nothing, unable


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatForm:
    """What tells the flat dialects apart when they are written.

    Args:
        format: registry name; a file of the dialect itself keeps its list as it wrote it.
        architecture: entry of `architectures`.
        names: name table.
        has_mask: `t2d` is stored.
        has_list: captured layers are listed in `eagle_config`.
        has_many_layers: layers after the first have names.
    """

    format: str
    architecture: str
    names: NameTable
    has_mask: bool = True
    has_list: bool = True
    has_many_layers: bool = True


SAFEAILAB = FlatForm(
    format="safeailab-eagle3",
    architecture="LlamaForCausalLM",
    names=SAFEAILAB_NAMES,
    has_list=False,
    has_many_layers=False,
)
SPECFORGE = FlatForm(
    format="specforge-eagle3",
    architecture="LlamaForCausalLMEagle3",
    names=SAFEAILAB_NAMES,
    has_many_layers=False,
)
MODELOPT = FlatForm(
    format="modelopt-eagle3",
    architecture="LlamaForCausalLMEagle3",
    names=SPECULATORS_NAMES,
    has_mask=False,
)
NEMO = FlatForm(format="nemo-eagle3", architecture="LlamaEagle3DraftModel", names=NEMO_NAMES)
PEAGLE = FlatForm(format="peagle", architecture="PEagleDraftModel", names=SPECULATORS_NAMES)
_WITH_MIDLAYER = ("safeailab-eagle3", "specforge-eagle3")


@carrying
def write_safeailab(request: WriteRequest) -> Written:
    """Return the draft with a flat config and `midlayer.` names.

    Diagnostics: SD601 `aux-layer-ids` when the captured layers are not the format's default; SD602
    without a target to compare them with, for norms that the reference lacks and for more than one
    layer.
    """
    problems = [*_default_layers(request), *undeclared_parts(request.draft, SAFEAILAB.format)]
    written = _write(request, SAFEAILAB, problems)
    decoder = request.draft.decoder
    if decoder is None or not written.config:
        return written
    return replace(written, config={**written.config, **reference_rope(decoder.rope)})


@carrying
def write_specforge(request: WriteRequest) -> Written:
    """Return the draft with `eagle_config` and `midlayer.` names.

    Diagnostics: SD602 for several layers, for other than three captured states, and for a normed
    residual, which no reader of this dialect computes.
    """
    draft = request.draft
    problems = [*normed_residual(draft, "specforge-eagle3")]
    if draft.num_aux_states not in (None, 3):
        problems.append(
            unable(
                where=f"{CONFIG}#/{AUX_KEY}",
                message="SpecForge's drafts capture three states",
                expected=3,
                found=draft.num_aux_states,
            )
        )
    return _write(request, SPECFORGE, problems)


@carrying
def write_nemo(request: WriteRequest) -> Written:
    """Return the draft with `eagle_config` and names inside a module `model`."""
    return _write(request, NEMO, [*normed_residual(request.draft, "nemo-eagle3")])


@carrying
def write_modelopt(request: WriteRequest) -> Written:
    """Return the draft with `eagle_config`, `layers.` names and no mask.

    Parts that the draft leaves out are switched off; parallel heads keep their names.
    """
    draft = request.draft
    problems = [*normed_residual(draft, "modelopt-eagle3")]
    written = _write(request, MODELOPT, problems, has_all_parts=False)
    if not written.config:
        return written
    eagle = dict(written.config["eagle_config"])
    eagle["use_aux_hidden_state"] = "fc.weight" in draft.tensors
    eagle["use_input_layernorm_in_first_layer"] = "layers.0.input_norm" in draft.tensors
    eagle["use_last_layernorm"] = "norm" in draft.tensors
    heads: dict[str, TensorSource] = {
        role: Copy(ref=ref) for role, ref in draft.tensors.items() if is_head_role(role)
    }
    return Written(
        config={**written.config, "eagle_config": dict(sorted(eagle.items()))},
        tensors={**written.tensors, **heads},
        diagnostics=written.diagnostics,
    )


@carrying
def write_peagle(request: WriteRequest) -> Written:
    """Return a parallel draft with a flat config; `mask_hidden` becomes [1, A*Ht].

    Diagnostics: SD602 without a mask token or `mask_hidden`.
    """
    draft = request.draft
    mask = draft.tensors.get("mask_hidden")
    if mask is None or draft.mask_token_id is None:
        return nothing(no_mask(draft))
    written = _write(request, PEAGLE, [])
    if not written.config:
        return written
    config: dict[str, Any] = {
        **written.config,
        "parallel_drafting": True,
        "ptd_token_id": draft.mask_token_id,
    }
    if draft.geometry is not None:
        config["num_depths"] = draft.geometry.num_speculative_tokens
    width = mask.shape[-1] if mask.shape else 0
    tensors: dict[str, TensorSource] = {
        **written.tensors,
        MASK_KEY: Copy(ref=mask, shape=(1, width)),
    }
    return Written(config=config, tensors=tensors, diagnostics=written.diagnostics)


def no_mask(draft: DraftCheckpoint) -> Diagnostic:
    """Return SD602 for a parallel draft whose later slots have nothing to read."""
    has_token = draft.mask_token_id is not None
    return unable(
        where=CONFIG,
        message="a parallel draft needs a mask token and `mask_hidden`",
        expected="both",
        found="no `mask_hidden`" if has_token else "no mask token",
    )


def _write(
    request: WriteRequest,
    form: FlatForm,
    problems: list[Diagnostic],
    *,
    has_all_parts: bool = True,
) -> Written:
    draft, decoder = request.draft, request.draft.decoder
    is_own = draft.format == form.format
    problems = [*common_problems(draft, is_own=is_own), *problems]
    if has_all_parts:
        problems += missing_parts(draft)
    if decoder is None:
        return nothing(*problems)
    has_file_form = form.has_many_layers or draft.format in _WITH_MIDLAYER
    if decoder.num_layers > 1 and not has_file_form:
        problems.append(
            no_place(draft, "layers.1.post_attention_norm", "the dialect has one layer, `midlayer`")
        )
    config = _config(draft, decoder, form)
    if form.has_list:
        unreadable = list(_unreadable_list(draft.aux_layer_ids))
        # A file of this dialect may hold a list that outputs cannot say: it is kept.
        is_kept = is_own and (
            draft.aux_layer_ids is None or (bool(unreadable) and _is_held(request))
        )
        ids = draft.declared_aux_ids if is_kept else draft.aux_layer_ids
        listed = {} if ids is None else {AUX_KEY: list(ids)}
        config["eagle_config"] = {**listed, "use_aux_hidden_state": True}
        if not is_kept:
            problems += unreadable
    tensors: dict[str, TensorSource] = named_tensors(draft, form.names)
    problems += add_shared(request, tensors, "head")
    return Written(
        config=config,
        tensors=tensors | map_tensors(draft, with_mask=form.has_mask),
        diagnostics=tuple(problems),
    )


def _config(draft: DraftCheckpoint, decoder: Decoder, form: FlatForm) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [form.architecture],
        **layer_config(draft, decoder),
        **dtype_config(draft),
        "draft_vocab_size": draft.draft_vocab_size,
        "target_hidden_size": draft.target_hidden_size,
    }
    flags = {
        "bias": draft.has_fc_bias,
        "fc_norm": draft.has_fc_norm,
        "norm_before_fc": draft.has_norm_before_fc,
        "norm_before_residual": draft.has_norm_before_residual,
        "norm_output": draft.has_norm_output,
    }
    return config | {name: True for name, holds in flags.items() if holds}


def _is_held(request: WriteRequest) -> bool:
    """Tell whether the list as the source has it is read as the captured layers to write."""
    ids, target = request.draft.declared_aux_ids, request.target
    if not ids:
        return False
    numbering, _, _ = decide_numbering(ids, None if target is None else target.num_layers)
    return numbering is not None and to_canonical(ids, numbering) == request.draft.aux_layer_ids


def _unreadable_list(ids: tuple[int, ...] | None) -> Iterator[Diagnostic]:
    if ids is not None and ids[:1] != (1,):
        yield unable(
            where=f"{CONFIG}#/eagle_config/{AUX_KEY}",
            message=f"the list {list(ids)} counts outputs, and engines read a list as outputs only "
            "when it begins with 1",
            expected="a first id of 1",
            found=ids[0] if ids else "an empty list",
        )


def _default_layers(request: WriteRequest) -> Iterator[Diagnostic]:
    """Report captured layers that a dialect without a field for them would lose."""
    ids, target = request.draft.aux_layer_ids, request.target
    if ids is None:
        return
    where = f"{CONFIG}#/{AUX_KEY}"
    layers = request.draft.target_num_layers if target is None else target.num_layers
    if layers is None:
        yield unable(
            where=where,
            message="the dialect captures boundaries [2, n//2, n-3] of the target's n layers, and "
            "n is not known here",
            expected="--target TARGET",
            found="no target",
        )
    elif ids != to_canonical(default_boundaries(layers), "boundary"):
        yield lost(
            "aux-layer-ids",
            where=where,
            message=f"outputs {list(ids)} are captured, not the default of {layers} layers",
            found=list(ids),
        )
