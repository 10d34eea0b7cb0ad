"""Speculators dflash, dflash2, dspark and xpress: one backbone, one config, four kinds of heads.

Foreign conventions undone: captured layers are boundaries; an absent `sample_from_anchor` is the
class default for all but dspark, whose early files were trained against it (SD307);
`sliding_window_non_causal` true opens the block of sliding layers and becomes `causal` false.
*Source:* Speculators 0.5 to 0.9 (`DFlashSpeculatorConfig` and its three subclasses).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specctl.checkpoint import Checkpoint
from specctl.contract.manifest import Decoder
from specctl.contract.roles import DSPARK_ROLES, TensorRole
from specctl.draft import Algorithm, DraftCheckpoint
from specctl.formats.assemble import assemble, is_whole
from specctl.formats.aux_layers import read_boundary_ids
from specctl.formats.block import facts
from specctl.formats.block.heads import read_heads
from specctl.formats.block.names import (
    DFLASH2_NAMES,
    DFLASH_NAMES,
    DSPARK_NAMES,
    XPRESS_NAMES,
)
from specctl.formats.block.places import open_sections
from specctl.formats.block.roles import DFLASH2_ROLES, DFLASH_ROLES, XPRESS_ROLES
from specctl.formats.decoder import count_layers, read_draft_stack, report_layer_count
from specctl.formats.eagle.eagle3 import read_target_hidden
from specctl.formats.fields import Fields, ReaderFindings, root_fields
from specctl.formats.names import NameTable
from specctl.formats.speculators import layer_fields, read_token_count
from specctl.formats.vocabulary import read_vocabulary, report_library_map


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One `speculators_model_type` of the family.

    Args:
        algorithm: the type's name, which is also the algorithm.
        is_open: default of `sliding_window_non_causal`.
    """

    algorithm: Algorithm
    names: NameTable
    roles: tuple[TensorRole, ...]
    is_open: bool = False

    @property
    def format(self) -> str:
        """Return the dialect's name."""
        return f"speculators-{self.algorithm}"


KINDS: Mapping[str, Kind] = {
    kind.algorithm: kind
    for kind in (
        Kind(algorithm="dflash", names=DFLASH_NAMES, roles=DFLASH_ROLES),
        Kind(algorithm="dflash2", names=DFLASH2_NAMES, roles=DFLASH2_ROLES, is_open=True),
        Kind(algorithm="dspark", names=DSPARK_NAMES, roles=DSPARK_ROLES),
        Kind(algorithm="xpress", names=XPRESS_NAMES, roles=XPRESS_ROLES),
    )
}


def read(algorithm: str, checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft of the kind of that name; every defect is in its diagnostics."""
    kind = KINDS[algorithm]
    root = root_fields(checkpoint.config, ReaderFindings())
    layers, family = layer_fields(root, absent_model_type="qwen3")
    tokens = read_token_count(root, kind.algorithm)
    matched = kind.names.match(checkpoint.tensors, root.findings)
    sections = open_sections(root)
    heads = read_heads(kind.algorithm, sections, matched, layers)
    block_place, size = facts.settle_block(
        sections.places("block_size", "dflash_config.block_size")
    )
    anchor = _anchor(root, kind, size, tokens)
    aux = read_boundary_ids(root, "aux_hidden_state_layer_ids", has_default=False)
    num_layers = count_layers(matched.tensors)
    if family is not None and is_whole(checkpoint):
        report_layer_count(layers, num_layers)
    decoder = read_draft_stack(
        checkpoint,
        kind.names,
        kind.roles,
        matched=matched,
        layers=layers,
        family=family,
        num_layers=num_layers,
        num_aux_states=aux.num_states or 0,
        head_conditions=heads.conditions,
    )
    mask_places = sections.places("mask_token_id", "dflash_config.mask_token_id")
    block = heads.block(
        mask_token_id=facts.read_mask_token(mask_places, checkpoint.file_names),
        sample_from_anchor=anchor,
        draft_block_size=size,
    )
    vocabulary = read_vocabulary(checkpoint, matched, root=root, layers=layers)
    report_library_map(vocabulary, matched, root.findings)
    heads.check(
        root.findings,
        block,
        hidden_size=layers.integer("hidden_size"),
        target_vocab_size=vocabulary.target_vocab_size,
        draft_vocab_size=vocabulary.draft_vocab_size,
    )
    return assemble(
        checkpoint,
        format=kind.format,
        algorithm=kind.algorithm,
        roles=kind.roles,
        root=root,
        layers=layers,
        matched=matched,
        decoder=decoder,
        target_hidden_size=read_target_hidden(root, layers),
        target_num_layers=None,
        aux=aux,
        vocabulary=vocabulary,
        num_speculative_tokens=tokens,
        geometry=facts.read_geometry(
            root.findings,
            size=size,
            anchor=anchor,
            tokens=tokens,
            size_where=block_place.where,
            tokens_where=root.where("speculators_config/proposal_methods"),
        ),
        block=block,
        sizes=heads.sizes_at(size),
        details={**heads.details, **_causal(root, kind, decoder)},
    )


def _anchor(root: Fields, kind: Kind, size: int | None, tokens: int | None) -> bool | None:
    if kind.algorithm == "dspark":
        return facts.infer_anchor(root, size, tokens)
    places = open_sections(root).places("sample_from_anchor")
    return facts.read_anchor(places, default=False, rule=f"default of the {kind.algorithm} class")


def _causal(root: Fields, kind: Kind, decoder: Decoder | None) -> dict[str, bool]:
    key = "sliding_window_non_causal"
    is_open = root.flag(key)
    if is_open is None:
        is_open = kind.is_open
    types = None if decoder is None else decoder.layer_types
    stated = False if is_open else None
    return facts.causal_override(stated, types, root.findings, root.where(key))
