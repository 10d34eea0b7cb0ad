"""One multi-token-prediction layer, as Speculators and as DeepSeek's key layout name it.

The layer reads fc(concat(embedding_norm(embedding), hidden_norm(state))), embedding half first,
where the state is the target's *final-normed* one; it has no captured layers and no map, and its
head is the target's unless the file stores one.
*Source:* Speculators mtp; DeepSeek-V3 layer 61 (`eh_proj`, `enorm`, `hnorm`, `shared_head.norm`).
"""

from __future__ import annotations

from specctl.checkpoint import Checkpoint
from specctl.contract.roles import MTP_ROLES
from specctl.draft import DraftCheckpoint, chain_geometry
from specctl.formats.assemble import assemble
from specctl.formats.aux_layers import NO_AUX
from specctl.formats.decoder import read_draft_stack
from specctl.formats.fields import Fields
from specctl.formats.model_types import Family
from specctl.formats.names import NameTable
from specctl.formats.vocabulary import identity_vocabulary

COUNT_KEY = "num_nextn_predict_layers"


def read_mtp(
    checkpoint: Checkpoint,
    *,
    format: str,
    names: NameTable,
    root: Fields,
    layers: Fields,
    family: Family | None,
    num_speculative_tokens: int | None,
    target_num_layers: int | None,
) -> DraftCheckpoint:
    """Return the draft from its config facts and tensors.

    Args:
        checkpoint: the opened files.
        format: dialect.
        names: its name table; the layer's roles are `layers.0.*`.
        root: config root.
        layers: object with the layer's dimensions.
        family: of the layer, None when it is not supported.
        num_speculative_tokens: as the file declares it.
        target_num_layers: layers that the file's numbering gives the target.
    """
    matched = names.match(checkpoint.tensors, root.findings)
    decoder = read_draft_stack(
        checkpoint,
        names,
        MTP_ROLES,
        matched=matched,
        layers=layers,
        family=family,
        num_layers=1,
        num_aux_states=0,
    )
    hidden = layers.integer("hidden_size")
    root.findings.derived(
        "draft.target_hidden_size",
        layers.where("hidden_size"),
        "an MTP layer has the target's width",
    )
    gamma = num_speculative_tokens
    return assemble(
        checkpoint,
        format=format,
        algorithm="mtp",
        roles=MTP_ROLES,
        root=root,
        layers=layers,
        matched=matched,
        decoder=decoder,
        target_hidden_size=hidden,
        target_num_layers=target_num_layers,
        aux=NO_AUX,
        vocabulary=identity_vocabulary(layers),
        num_speculative_tokens=gamma,
        geometry=None if gamma is None else chain_geometry(gamma),
    )


def refuse_several_layers(root: Fields, found: int) -> None:
    """Report SD205 when config or file hold more than one prediction layer."""
    stated = root.integer(COUNT_KEY, minimum=0) if root.has(COUNT_KEY) else None
    most = max(found, stated or 0)
    if most > 1:
        root.findings.add(
            "SD205",
            where=root.where(COUNT_KEY),
            message=f"{most} prediction layers; only drafts with one are supported",
            expected=1,
            found=most,
        )
