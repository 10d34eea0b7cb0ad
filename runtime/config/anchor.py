"""Read a block draft with a given meaning of slot 0, against its manifest; for diagnosis only.

A draft trained with the other layout still runs: every slot predicts the token beside its own. The
tokens stay the target's, the accept length falls toward 1. Manifests that contradict themselves
about it are refused (SD302 when one is made, SD710 and SD711 when it is loaded); what is left is a
draft whose config was wrong all along, and this shows what that looks like.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from runtime.config.values import Overrides
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.manifest import Manifest

AnchorLayout = Literal["sampled", "conditioning"]
"""What slot 0 of a block is: a trained prediction, or the known token that the others see."""
_WHERE = "--force-anchor-layout"


def force_anchor(
    manifest: Manifest, overrides: Overrides | None
) -> tuple[Manifest, tuple[Diagnostic, ...]]:
    """Return the manifest with the layout that was asked for, and SD840 when that is another one.

    SD805 when the setting changes nothing.

    Raises:
        DiagnosticError: SD832, there is no such layout.
    """
    layout = None if overrides is None else overrides.force_anchor_layout
    if layout is None:
        return manifest, ()
    known: tuple[AnchorLayout, ...] = get_args(AnchorLayout)
    if layout not in known:
        expected = " or ".join(known)
        message = f"there is no anchor layout `{layout}`"
        found = diagnose("SD832", where=_WHERE, message=message, expected=expected, found=layout)
        raise DiagnosticError(found)
    geometry, is_sampled = manifest.geometry, layout == "sampled"
    size = geometry.draft_block_size
    if size is None or geometry.sample_from_anchor is None:
        return manifest, (_idle("the draft has no block of slots"),)
    if geometry.sample_from_anchor == is_sampled:
        return manifest, (_idle("the manifest says the same"),)
    available = size if is_sampled else size - 1
    gamma = min(geometry.num_speculative_tokens, available)
    forced = msgspec.structs.replace(
        geometry,
        num_speculative_tokens=gamma,
        draft_width=gamma if is_sampled else gamma + 1,
        verify_width=gamma + 1,
        sample_from_anchor=is_sampled,
    )
    warning = diagnose(
        "SD840",
        where="manifest#/geometry/sample_from_anchor",
        message=f"the draft's slot 0 is read as `{layout}` because {_WHERE} says so",
        expected=geometry.sample_from_anchor,
        found=is_sampled,
    )
    return msgspec.structs.replace(manifest, geometry=forced), (warning,)


def _idle(reason: str) -> Diagnostic:
    return diagnose("SD805", where=_WHERE, message=f"`force_anchor_layout` has no effect: {reason}")
