"""Write dialects that hold only their own drafts: DeepSpec's, and those with latent attention.

Their configs say things that no other dialect does (training lengths, ranks), so a draft comes from
a file of the same dialect, or its missing fields are SD602.
*Source:* deepseek-ai/DeepSpec `deepspec/modeling/eagle3/qwen3/config.py`; Model-Optimizer's Kimi-K2
export.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specctl.contract.diagnostics import Diagnostic
from specctl.contract.file_names import CONFIG
from specctl.formats.aux_layers import AUX_KEY
from specctl.formats.eagle import deepspec, mla
from specctl.formats.eagle.write_problems import missing_parts
from specctl.formats.writing import (
    SHARED_KEYS,
    VOCABULARY_ROLES,
    add_shared,
    dtype_config,
    layer_config,
    map_tensors,
    named_tensors,
    target_layers,
)
from specctl.formats.writing_quantized import carrying
from specctl.formats.written import WriteRequest, Written, nothing, unable

_TRAINING = ("ttt_length", "step_loss_decay")


@carrying
def write_deepspec(request: WriteRequest) -> Written:
    """Return the draft as DeepSpec's `Qwen3Eagle3Model`.

    Diagnostics: SD602 for a reduced vocabulary, norm variants, layers of another family, no
    embedding or head, and for training fields that the class demands and the source lacks.
    """
    draft, decoder = request.draft, request.draft.decoder
    problems = [*_deepspec_problems(request), *missing_parts(draft)]
    if decoder is None or draft.aux_layer_ids is None:
        return nothing(*problems)
    tensors = named_tensors(draft, deepspec.NAMES, without=(*VOCABULARY_ROLES, "embedding", "head"))
    problems += add_shared(request, tensors, *SHARED_KEYS)
    config: dict[str, Any] = {
        "architectures": ["Qwen3Eagle3Model"],
        **layer_config(draft, decoder),
        **dtype_config(draft),
        "draft_num_hidden_layers": decoder.num_layers,
        "num_target_layers": target_layers(request),
        "target_layer_ids": list(draft.aux_layer_ids),
        **{key: draft.config[key] for key in _TRAINING if key in draft.config},
    }
    if request.target_name is not None:
        config["target_model_name_or_path"] = request.target_name
    return Written(config=config, tensors=tensors, diagnostics=tuple(problems))


@carrying
def write_mla(request: WriteRequest) -> Written:
    """Return the draft with its own config, canonical names and `eagle_config`."""
    draft = request.draft
    if draft.format != "mla-eagle3":
        return nothing(
            unable(
                where=CONFIG,
                message="the draft's attention is not the latent one of this dialect",
                expected="a draft with latent attention",
                found=draft.format,
            )
        )
    config: dict[str, Any] = {
        **draft.config,
        "draft_vocab_size": draft.draft_vocab_size,
        "num_hidden_layers": draft.details["num_layers"],
        "vocab_size": draft.target_vocab_size,
    }
    if draft.declared_aux_ids is not None and AUX_KEY in config:
        eagle = config.get("eagle_config")
        nested = dict(eagle) if isinstance(eagle, dict) else {}
        config["eagle_config"] = {**nested, AUX_KEY: list(draft.declared_aux_ids)}
        del config[AUX_KEY]
    # ModelOpt, which writes this dialect, stores no mask; a stored one is kept.
    tensors = named_tensors(draft, mla.NAMES) | map_tensors(draft, with_mask="t2d" in draft.tensors)
    return Written(config=config, tensors=tensors)


def _deepspec_problems(request: WriteRequest) -> Iterator[Diagnostic]:
    draft, decoder = request.draft, request.draft.decoder
    is_variant = (
        draft.has_norm_before_residual
        or draft.has_norm_before_fc
        or draft.has_fc_norm
        or draft.has_norm_output
        or draft.has_fc_bias
    )
    is_qwen3 = decoder is not None and decoder.family == "qwen3"
    family = "unknown" if decoder is None else decoder.family
    rows: tuple[tuple[bool, str, str, object], ...] = (
        (is_qwen3, "has qwen3 layers", "qwen3", family),
        (draft.aux_layer_ids is not None, "lists the captured layers", "a list", "undecided"),
        (draft.map_kind == "identity", "has the target's vocabulary", "identity", draft.map_kind),
        (not is_variant, "has no norms beside EAGLE-3's", "none", "a variant"),
        (target_layers(request) is not None, "counts the target's layers", "--target", "nothing"),
    )
    for is_right, what, expected, found in rows:
        if not is_right:
            yield unable(
                where=CONFIG,
                message=f"DeepSpec's draft {what}",
                expected=expected,
                found=found,
            )
    for key in _TRAINING:
        if key not in draft.config:
            yield unable(
                where=f"{CONFIG}#/{key}",
                message=f"DeepSpec's class demands `{key}`, a fact of the training",
                expected=key,
                found="nothing",
            )
    if (
        decoder is not None
        and decoder.num_layers > 1
        and ("layers.1.hidden_norm" not in draft.tensors)
    ):
        yield unable(
            where=CONFIG,
            message="DeepSpec's layers after the first read the embedding again",
            expected="one layer, or layers of that kind",
            found=f"{decoder.num_layers} layers",
        )
