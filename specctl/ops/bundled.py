"""The section of a target's report on the draft inside it."""

from __future__ import annotations

from specctl.draft import DraftCheckpoint
from specctl.formats.mtp.naming import role_names
from specctl.ops.report import BundledDraft


def bundled_report(draft: DraftCheckpoint) -> BundledDraft:
    """Return what `inspect` says of prediction layers inside a target."""
    layers = draft.details.get("num_prediction_layers")
    return BundledDraft(
        format=draft.format,
        algorithm=draft.algorithm,
        num_layers=layers if isinstance(layers, int) else None,
        num_tensors=len(draft.tensors),
        num_bytes=sum(ref.end - ref.begin for ref in draft.tensors.values()),
        embedding=_own_key(draft, "embedding"),
        head=_own_key(draft, "head"),
        details=dict(draft.details),
    )


def _own_key(draft: DraftCheckpoint, name: str) -> str | None:
    """Return the key of the first layer's own copy."""
    found = (ref.key for role, ref in draft.tensors.items() if role_names(role)[1] == name)
    return min(found, default=None)
