"""PARD: a small causal LM that fills several mask tokens in one forward.

The checkpoint is an ordinary one of its architecture; only `pard_token` (or `ptd_token_id`) in the
config says that it is a draft. It reads tokens, so nothing of the target's states, and its own
width is free; its vocabulary must be the target's.
*Source:* AMD-AIG-AIMA/PARD; vLLM `speculative.py` for the second key.
"""

from __future__ import annotations

from specctl.checkpoint import Checkpoint
from specctl.contract.roles import TARGET_ROLES
from specctl.draft import DraftCheckpoint
from specctl.formats.assemble import BlockFacts, assemble
from specctl.formats.aux_layers import NO_AUX
from specctl.formats.decoder import count_layers, read_draft_stack, report_layer_count
from specctl.formats.fields import Fields, ReaderFindings, root_fields
from specctl.formats.heads.claims import PARD_MASK_KEYS
from specctl.formats.huggingface import NAMES
from specctl.formats.model_types import flat_layers
from specctl.formats.names import Matched
from specctl.formats.vocabulary import identity_vocabulary

MASK_PATH = "draft.mask_token_id"


def read(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft; every defect is in its diagnostics."""
    root = root_fields(checkpoint.config, ReaderFindings())
    layers, family = flat_layers(root, absent_model_type="llama")
    matched = NAMES.match(checkpoint.tensors, root.findings)
    num_layers = count_layers(matched.tensors)
    if num_layers and family is not None:
        report_layer_count(layers, num_layers)
    is_tied = bool(layers.flag("tie_word_embeddings"))
    decoder = read_draft_stack(
        checkpoint,
        NAMES,
        TARGET_ROLES,
        matched=matched,
        layers=layers,
        family=family,
        num_layers=num_layers,
        num_aux_states=0,
        head_conditions=frozenset() if is_tied else frozenset({"untied_head"}),
    )
    return assemble(
        checkpoint,
        format="pard",
        algorithm="pard",
        roles=TARGET_ROLES,
        root=root,
        layers=layers,
        matched=_with_tied_head(matched) if is_tied else matched,
        decoder=decoder,
        target_hidden_size=None,
        target_num_layers=None,
        aux=NO_AUX,
        vocabulary=identity_vocabulary(layers),
        num_speculative_tokens=root.integer("num_speculative_tokens"),
        geometry=None,
        block=BlockFacts(mask_token_id=_mask_token(root)),
        details={"spd_type": root.raw("spd_type"), "tie_word_embeddings": is_tied},
    )


def _mask_token(root: Fields) -> int | None:
    """Return the mask id; SD208 when both keys state one and they differ."""
    first, second = (root.integer(key, minimum=0) for key in PARD_MASK_KEYS)
    if first is not None and second is not None and first != second:
        root.findings.add(
            "SD208",
            where=root.where(PARD_MASK_KEYS[1]),
            message=f"`{PARD_MASK_KEYS[0]}` is {first} and `{PARD_MASK_KEYS[1]}` is {second}",
            expected="one mask id",
            found=f"{first} and {second}",
        )
    key = PARD_MASK_KEYS[0] if first is not None else PARD_MASK_KEYS[1]
    return root.integer(key, MASK_PATH, minimum=0)


def _with_tied_head(matched: Matched) -> Matched:
    """Return the tensors with the embedding as head, which is what a tied model computes."""
    embedding = matched.tensors.get("embedding")
    if embedding is None or "head" in matched.tensors:
        return matched
    return Matched(tensors={**matched.tensors, "head": embedding}, unmapped=matched.unmapped)
