"""Write block drafts: as Speculators, and in the flat dialects of z-lab, DeepSpec and ModelOpt.

Foreign conventions restored: Speculators counts boundaries (output id + 1, an id of the last layer
included), the flat dialects count outputs; z-lab's slot 0 only conditions and DeepSpec's is a
prediction, so neither can hold the other kind of draft; Speculators states the token count, the
others leave it to the block.
*Source:* Speculators 0.9 `DFlashSpeculatorConfig` and its subclasses; z-lab/dflash 0.1.0;
deepseek-ai/DeepSpec; ModelOpt pull request 2149.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specctl.contract.diagnostics import Diagnostic
from specctl.contract.file_names import MASK_EMBEDDING
from specctl.draft import DraftCheckpoint
from specctl.formats.block.flat import DEEPSPEC_DSPARK, DIALECTS, MODELOPT_DSPARK
from specctl.formats.block.heads import SHAPING_KEYS
from specctl.formats.block.speculators import KINDS
from specctl.formats.block.write_checks import (
    Facts,
    check_flat,
    check_speculators,
    check_zlab,
    settled_facts,
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
    speculators_section,
    target_layers,
)
from specctl.formats.written import TensorSource, WriteRequest, Written, nothing

_SPECULATORS_CLASSES = {
    "dflash": "DFlashSpeculator",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkSpeculator",
    "xpress": "XPressSpeculator",
}
_ZLAB_CLASSES = {"zlab-dflash": "DFlashDraftModel", "zlab-dflash2": "DFlash2DraftModel"}
_VARIANT_KEYS = (
    "attention_sink_bias",
    "causal",
    "final_logit_softcapping",
    "input_embedding_scale",
    "output_multiplier",
)


def write_speculators(algorithm: str, request: WriteRequest) -> Written:
    """Return the draft as a Speculators checkpoint of its kind.

    Embedding and head are the draft's own, else the target's. Diagnostics: SD602 for layers or
    variants that the class does not have, for open facts, and without a target to copy from.
    """
    kind = KINDS[algorithm]
    draft = request.draft
    problems = list(check_speculators(request))
    facts = settled_facts(draft)
    if facts is None:
        return nothing(*problems)
    tensors = named_tensors(draft, kind.names, without=(*VOCABULARY_ROLES, "embedding", "head"))
    problems += _share(request, tensors, is_optional=draft.format.startswith("speculators-"))
    config = {
        "architectures": [_SPECULATORS_CLASSES[kind.algorithm]],
        "aux_hidden_state_layer_ids": [index + 1 for index in facts.aux_layer_ids],
        "block_size": facts.draft_block_size,
        "draft_vocab_size": draft.draft_vocab_size,
        "mask_token_id": facts.mask_token_id,
        "sample_from_anchor": facts.sample_from_anchor,
        "sliding_window_non_causal": draft.details.get("causal") is False,
        "speculators_config": speculators_section(
            request, algorithm=kind.algorithm, num_tokens=facts.num_speculative_tokens
        ),
        "speculators_model_type": kind.algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": draft.target_hidden_size,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer_config(draft, facts.decoder),
        **_shaping(draft),
        **(_dspark_heads(draft) if kind.algorithm == "dspark" else {}),
        **dtype_config(draft),
    }
    return Written(
        config=dict(sorted(config.items())),
        tensors=tensors | map_tensors(draft),
        diagnostics=tuple(problems),
    )


def write_zlab(format: str, request: WriteRequest) -> Written:
    """Return the draft as z-lab's DFlash or DFlash2: no embedding, no head, the full vocabulary.

    Diagnostics: SD601 `embedding`, `head` and `token-count`; SD602 for a reduced vocabulary, a
    slot 0 that predicts, open facts, and without the target's layer count.
    """
    dialect = DIALECTS[format]
    draft = request.draft
    problems = list(check_zlab(request, dialect.format))
    facts = settled_facts(draft)
    if facts is None:
        return nothing(*problems)
    tensors = named_tensors(draft, dialect.names, without=(*VOCABULARY_ROLES, "embedding", "head"))
    nested = {
        "mask_token_id": facts.mask_token_id,
        "target_layer_ids": list(facts.aux_layer_ids),
        **_shaping(draft),
        **_variants(draft),
    }
    if facts.sample_from_anchor:
        nested["sample_from_anchor"] = True
    config = {
        **_flat(request, facts, _ZLAB_CLASSES[format]),
        "dflash_config": dict(sorted(nested.items())),
    }
    if "causal" in draft.details:
        config["is_causal"] = draft.details["causal"]
    return _written(draft, config, tensors, problems)


def write_deepspec(request: WriteRequest) -> Written:
    """Return the draft as DeepSpec's DSpark: a flat config, embedding and head stored.

    Diagnostics: SD601 `token-count`; SD602 for a slot 0 that only conditions, open facts, and
    without a target to copy embedding and head from.
    """
    draft = request.draft
    problems = list(check_flat(request, DEEPSPEC_DSPARK.format, is_anchor_sampled=True))
    facts = settled_facts(draft)
    if facts is None:
        return nothing(*problems)
    tensors = named_tensors(
        draft, DEEPSPEC_DSPARK.names, without=(*VOCABULARY_ROLES, "embedding", "head")
    )
    problems += _share(request, tensors, is_optional=draft.format == DEEPSPEC_DSPARK.format)
    config = {
        **_flat(request, facts, "Qwen3DSparkModel"),
        **_dspark_heads(draft),
        **_variants(draft),
        "layer_types": list(facts.decoder.layer_types),
        "mask_token_id": facts.mask_token_id,
        "sample_from_anchor": facts.sample_from_anchor,
        "target_layer_ids": list(facts.aux_layer_ids),
    }
    if not facts.sample_from_anchor:
        config["dspark_bonus_anchor"] = True
    return _written(draft, config, tensors | map_tensors(draft), problems)


def write_modelopt(request: WriteRequest) -> Written:
    """Return the draft with ModelOpt's flat names of DSpark's heads and z-lab's config.

    Diagnostics: SD601 `token-count`; SD602 for a draft without such heads and for open facts.
    """
    draft = request.draft
    problems = list(check_flat(request, MODELOPT_DSPARK.format, is_anchor_sampled=None))
    facts = settled_facts(draft)
    if facts is None:
        return nothing(*problems)
    tensors = named_tensors(draft, MODELOPT_DSPARK.names)
    heads = _dspark_heads(draft)
    heads["use_confidence_head"] = heads.pop("enable_confidence_head")
    nested = {
        "mask_token_id": facts.mask_token_id,
        "projector_type": "dspark",
        "shift_label": facts.sample_from_anchor,
        "target_layer_ids": list(facts.aux_layer_ids),
        **heads,
        **_variants(draft),
    }
    config = {
        **_flat(request, facts, "DFlashDraftModel"),
        "dflash_config": dict(sorted(nested.items())),
    }
    return _written(draft, config, tensors | map_tensors(draft), problems)


def _written(
    draft: DraftCheckpoint,
    config: dict[str, Any],
    tensors: dict[str, TensorSource],
    problems: list[Diagnostic],
) -> Written:
    files = {MASK_EMBEDDING: MASK_EMBEDDING} if "mask_file" in draft.details else {}
    return Written(
        config=dict(sorted(config.items())),
        tensors=tensors,
        diagnostics=tuple(problems),
        copied_files=files,
    )


def _share(
    request: WriteRequest, tensors: dict[str, TensorSource], *, is_optional: bool
) -> Iterator[Diagnostic]:
    """Add embedding and head; yield SD602 for one that is nowhere.

    Args:
        request: the draft and the target.
        tensors: receives them.
        is_optional: the dialect that the draft comes from leaves out what is the target's.
    """
    draft = request.draft
    for role in SHARED_KEYS:
        is_needed = role == "head" and draft.map_kind == "reduced"
        if role in draft.tensors or is_needed or not is_optional:
            yield from add_shared(request, tensors, role)


def _flat(request: WriteRequest, facts: Facts, architecture: str) -> dict[str, Any]:
    """Return what the root of every flat config says."""
    draft = request.draft
    config: dict[str, Any] = {
        "architectures": [architecture],
        **layer_config(draft, facts.decoder),
        **dtype_config(draft),
        "block_size": facts.draft_block_size,
    }
    layers = target_layers(request)
    if layers is not None:
        config["num_target_layers"] = layers
    if draft.draft_vocab_size != draft.target_vocab_size:
        config["draft_vocab_size"] = draft.draft_vocab_size
    if draft.target_name is not None:
        config["target_model_name_or_path"] = draft.target_name
    if draft.target_hidden_size != draft.hidden_size:
        config["target_hidden_size"] = draft.target_hidden_size
    return config


def _shaping(draft: DraftCheckpoint) -> dict[str, object]:
    keys = SHAPING_KEYS.get(draft.algorithm, ())
    return {key: draft.details[key] for key in keys if key in draft.details}


def _variants(draft: DraftCheckpoint) -> dict[str, object]:
    return {key: draft.details[key] for key in _VARIANT_KEYS if key in draft.details}


def _dspark_heads(draft: DraftCheckpoint) -> dict[str, Any]:
    markov = draft.markov
    return {
        "markov_rank": 0 if markov is None else markov.rank,
        "markov_head_type": "vanilla" if markov is None else markov.kind,
        "enable_confidence_head": draft.has_confidence_head,
        "confidence_head_with_markov": draft.is_confidence_with_markov,
    }
