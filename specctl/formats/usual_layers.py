"""Tell a list of captured layers that was counted in the other numbering, where it can be told.

A boundary list that equals the usual list of outputs was copied without its conversion; one that
lies one past the usual boundaries was converted twice. Both load, and every state is one layer off.
*Source:* the recipe in speculators issue 753 passes NVIDIA's [1, 23, 44] on as it is; vLLM pull
request 40727 measured what one layer costs a DFlash draft.
"""

from __future__ import annotations

from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.draft import DraftCheckpoint
from specctl.formats.aux_layers import default_boundaries
from specctl.formats.block.flat_aux import default_outputs

_MIN_STATES = 3
_AUX = "draft.aux_layer_ids"


def shifted_list(draft: DraftCheckpoint, num_layers: int) -> Diagnostic | None:
    """Return SD331 for a list of boundaries that is one off the usual one, None for any other.

    Args:
        draft: as read; ids that the user gave are taken as they are.
        num_layers: layers of the target.
    """
    ids, origin = draft.declared_aux_ids, draft.origins.get(_AUX)
    is_given = origin is None or origin.kind == "given"
    if ids is None or is_given or draft.aux_numbering != "boundary":
        return None
    usual = _usual(draft, num_layers, len(ids))
    if usual is None or origin is None:
        return None
    lower, higher = tuple(k - 1 for k in usual), tuple(k + 1 for k in usual)
    if ids not in (lower, higher):
        return None
    told = "outputs of layers" if ids == lower else "boundaries converted twice"
    return diagnose(
        "SD331",
        where=origin.where,
        message=f"{list(ids)} are the usual captured layers of {num_layers} as {told}; this list "
        "counts boundaries",
        expected=list(usual),
        found=list(ids),
        notes=(f"as it stands: outputs of layers {[k - 1 for k in ids]}",),
    )


def _usual(draft: DraftCheckpoint, num_layers: int, num_states: int) -> tuple[int, ...] | None:
    """Return the boundaries that a draft of this kind captures when nobody chooses others."""
    if num_states < _MIN_STATES or num_layers <= num_states:
        return None
    if draft.is_block:
        return tuple(i + 1 for i in default_outputs(num_layers, num_states))
    if draft.captures_states and num_states == _MIN_STATES:
        return default_boundaries(num_layers)
    return None
