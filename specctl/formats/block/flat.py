"""Flat configs of block drafts: z-lab DFlash and DFlash2, DeepSpec and ModelOpt DSpark, Domino.

Foreign conventions undone: `target_layer_ids` counts outputs; block, mask, ids, heads and anchor
stand at the root or in `dflash_config`, `dspark_config` or behind a `dspark_` prefix, and all
places must agree (SD208); `shift_label` true trains slot 0 to predict, like `sample_from_anchor`;
`dspark_bonus_anchor` is its opposite. None of these files says how many tokens to draft: the block
and its anchor do.
*Source:* z-lab/dflash 0.1.0; deepseek-ai/DeepSpec; SpecForge; ModelOpt pull request 2149; vLLM
`qwen3_dflash.py` for the places that are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specctl.checkpoint import Checkpoint
from specctl.contract.file_names import MASK_EMBEDDING
from specctl.contract.manifest import Decoder
from specctl.contract.roles import DFLASH2_HEADS, TensorRole
from specctl.draft import Algorithm, DraftCheckpoint
from specctl.formats.assemble import NormFlags, assemble
from specctl.formats.block import facts
from specctl.formats.block.flat_aux import read_flat_aux
from specctl.formats.block.flat_layers import is_latent, layer_object, read_stack
from specctl.formats.block.heads import read_heads
from specctl.formats.block.names import (
    DFLASH2_NAMES,
    DFLASH_NAMES,
    DOMINO_NAMES,
    DSPARK_NAMES,
    FLAT_DSPARK_NAMES,
)
from specctl.formats.block.places import Sections, open_sections, settle
from specctl.formats.block.roles import (
    DFLASH_ROLES,
    DOMINO_HEADS,
    DSPARK_HEADS,
)
from specctl.formats.decoder import count_layers
from specctl.formats.eagle.eagle3 import read_target_hidden
from specctl.formats.fields import ReaderFindings, root_fields
from specctl.formats.names import NameTable
from specctl.formats.vocabulary import read_vocabulary

BLOCK_PLACES = (
    "block_size",
    "dflash_config.block_size",
    "dspark_config.block_size",
    "dspark_block_size",
)
MASK_PLACES = (
    "dflash_config.mask_token_id",
    "mask_token_id",
    "dspark_config.mask_token_id",
    "dspark_noise_token_id",
    "pard_token",
    "ptd_token_id",
)
_ANCHOR_PLACES = (
    "sample_from_anchor",
    "dflash_config.sample_from_anchor",
    "dspark_config.sample_from_anchor",
)
_CAUSAL_PLACES = ("dflash_config.causal", "is_causal", "causal")
_NUMBERS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
# Known, without a part in the forward pass, or said by what else was read.
_NOTES = (
    "target_model_type",
    "target_text_model_type",
    "draft_num_hidden_layers",
    "pure_draft_prefix_len",
    "projector_type",
    "use_aux_hidden_state",
    "num_lookahead_tokens",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """What distinguishes the flat dialects.

    Args:
        format: name in the registry.
        algorithm: that the draft computes.
        names: name table.
        heads: roles beside the backbone.
        anchor: what slot 0 is without a field for it, None when the dialect has no rule.
        has_default_aux: an absent list of captured layers follows from the layer counts.
    """

    format: str
    algorithm: Algorithm
    names: NameTable
    heads: tuple[TensorRole, ...] = ()
    anchor: bool | None
    has_default_aux: bool = False


ZLAB_DFLASH = Dialect(
    format="zlab-dflash",
    algorithm="dflash",
    names=DFLASH_NAMES,
    anchor=False,
    has_default_aux=True,
)
ZLAB_DFLASH2 = Dialect(
    format="zlab-dflash2",
    algorithm="dflash2",
    names=DFLASH2_NAMES,
    heads=DFLASH2_HEADS,
    anchor=False,
    has_default_aux=True,
)
LAGUNA_DFLASH = Dialect(
    format="laguna-dflash", algorithm="dflash", names=DFLASH_NAMES, anchor=False
)
DEEPSPEC_DSPARK = Dialect(
    format="deepspec-dspark",
    algorithm="dspark",
    names=DSPARK_NAMES,
    heads=DSPARK_HEADS,
    anchor=True,
)
MODELOPT_DSPARK = Dialect(
    format="modelopt-dspark",
    algorithm="dspark",
    names=FLAT_DSPARK_NAMES,
    heads=DSPARK_HEADS,
    anchor=None,
)
DOMINO = Dialect(
    format="domino", algorithm="domino", names=DOMINO_NAMES, heads=DOMINO_HEADS, anchor=None
)
DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        dialect.format: dialect
        for dialect in (
            ZLAB_DFLASH,
            ZLAB_DFLASH2,
            LAGUNA_DFLASH,
            DEEPSPEC_DSPARK,
            MODELOPT_DSPARK,
            DOMINO,
        )
    }
)


def read(format: str, checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft in the dialect of that name; every defect is in its diagnostics."""
    dialect = DIALECTS[format]
    root = root_fields(checkpoint.config, ReaderFindings())
    sections = open_sections(root)
    layers = layer_object(sections)
    matched = dialect.names.match(checkpoint.tensors, root.findings)
    heads = read_heads(dialect.algorithm, sections, matched, layers)
    num_target_layers = root.integer("num_target_layers")
    aux = read_flat_aux(
        sections,
        num_target_layers=num_target_layers,
        default_states=count_layers(matched.tensors) if dialect.has_default_aux else None,
    )
    stack = read_stack(
        checkpoint,
        dialect.names,
        backbone=DFLASH_ROLES,
        heads=dialect.heads,
        matched=matched,
        layers=layers,
        num_aux_states=aux.num_states or 0,
        conditions=heads.conditions,
    )
    block_place, size = facts.settle_block(sections.places(*BLOCK_PLACES))
    block = heads.block(
        mask_token_id=facts.read_mask_token(sections.places(*MASK_PLACES), checkpoint.file_names),
        sample_from_anchor=_anchor(sections, dialect),
        draft_block_size=size,
    )
    vocabulary = read_vocabulary(checkpoint, matched, root=root, layers=layers)
    heads.check(
        root.findings,
        block,
        hidden_size=layers.integer("hidden_size"),
        target_vocab_size=vocabulary.target_vocab_size,
        draft_vocab_size=vocabulary.draft_vocab_size,
    )
    if is_latent(matched):
        _report_latent(sections)
    return assemble(
        checkpoint,
        format=dialect.format,
        algorithm=dialect.algorithm,
        roles=stack.roles,
        root=root,
        layers=layers,
        matched=matched,
        decoder=stack.decoder,
        target_hidden_size=read_target_hidden(root, layers),
        target_num_layers=num_target_layers,
        aux=aux,
        vocabulary=vocabulary,
        num_speculative_tokens=None,
        geometry=facts.read_geometry(
            root.findings,
            size=size,
            anchor=block.sample_from_anchor,
            tokens=None,
            size_where=block_place.where,
            tokens_where=block_place.where,
        ),
        flags=NormFlags(has_fc_norm="fc_norm.0" in matched.tensors),
        block=block,
        sizes={**stack.sizes, **heads.sizes_at(size)},
        details={
            **heads.details,
            **_variants(sections),
            **_causal(sections, stack.decoder),
            **_mask_file(checkpoint),
        },
    )


def _anchor(sections: Sections, dialect: Dialect) -> bool | None:
    places = (
        *sections.places(*_ANCHOR_PLACES),
        *sections.places("dspark_bonus_anchor", meaning=_opposite),
        *sections.places("dflash_config.shift_label", "shift_label"),
    )
    rules = {
        True: "DeepSpec trains every slot to predict",
        False: "z-lab's slot 0 only conditions",
        None: "",
    }
    return facts.read_anchor(places, default=dialect.anchor, rule=rules[dialect.anchor])


def _opposite(value: object) -> object:
    return not value if isinstance(value, bool) else value


def _variants(sections: Sections) -> dict[str, object]:
    """Return the fields that change the forward pass beside those with an own place."""
    for name in _NOTES:
        settle(sections.places(f"dflash_config.{name}", name))
    found: dict[str, object] = {}
    for key in _NUMBERS:
        place = settle(sections.places(f"dflash_config.{key}", key))
        value = None if place is None else place.fields.number(key)
        if value is not None and (key == "final_logit_softcapping" or value != 1):
            found[key] = value
    sink = settle(
        sections.places(
            "dflash_config.attention_sink_bias",
            "attention_sink_bias",
            "add_swa_attention_sink_bias",
        )
    )
    if sink is not None and sink.fields.raw(sink.key):
        found["attention_sink_bias"] = sink.fields.raw(sink.key)
    return found


def _causal(sections: Sections, decoder: Decoder | None) -> dict[str, bool]:
    place = settle(sections.places(*_CAUSAL_PLACES))
    if place is None:
        return {}
    types = None if decoder is None else decoder.layer_types
    return facts.causal_override(
        place.fields.flag(place.key), types, sections.root.findings, place.where
    )


def _mask_file(checkpoint: Checkpoint) -> dict[str, object]:
    return {"mask_file": MASK_EMBEDDING} if MASK_EMBEDDING in checkpoint.file_names else {}


def _report_latent(sections: Sections) -> None:
    place = settle(sections.places("dflash_config.attention_mode", "attention_mode"))
    settle(sections.places("dflash_config.attention_modes", "attention_modes"))
    root = sections.root
    root.findings.add(
        "SD230",
        where=root.where("attention_mode") if place is None else place.where,
        message="the layers have latent attention (MLA): names and shapes are checked only",
        found="kv_a_proj_with_mqa",
    )
