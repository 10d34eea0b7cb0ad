"""What a conversion gives up, and whether the user allowed it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.file_names import CONFIG
from specctl.draft import DraftCheckpoint
from specctl.formats.written import loss_of, lost

_SHOWN = 5


def general_losses(draft: DraftCheckpoint) -> Iterator[Diagnostic]:
    """Yield the losses that every change of dialect has: what no rule of the source reads."""
    if draft.unknown_fields:
        names = _listed(draft.unknown_fields)
        yield lost(
            "unknown-fields",
            where=f"{CONFIG}#{draft.unknown_fields[0]}",
            message=f"{len(draft.unknown_fields)} fields of the config are not known",
            found=names,
        )
    if draft.unmapped:
        file = draft.files[0].file if draft.files else CONFIG
        yield lost(
            "unmapped-tensors",
            where=f"{file}::{draft.unmapped[0]}",
            message=f"{len(draft.unmapped)} tensors have no role",
            found=_listed(draft.unmapped),
        )


def losses_in(diagnostics: Iterable[Diagnostic]) -> tuple[str, ...]:
    """Return the names of the losses among the findings, each once, sorted."""
    return tuple(sorted({name for d in diagnostics if (name := loss_of(d)) is not None}))


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else ""
    return ", ".join(names[:_SHOWN]) + more


def judge_losses(
    diagnostics: Iterable[Diagnostic], allowed: tuple[str, ...]
) -> tuple[Diagnostic, ...]:
    """Return the findings with allowed losses made infos, and SD610 for names that met none."""
    found = [
        msgspec.structs.replace(d, severity="info") if loss_of(d) in allowed else d
        for d in diagnostics
    ]
    met = {loss_of(d) for d in found}
    found += [
        diagnose(
            "SD610",
            where="--allow",
            message=f"`--allow {name}`: this conversion does not lose that",
            expected=", ".join(sorted(n for n in met if n is not None)) or "no --allow",
            found=name,
        )
        for name in dict.fromkeys(allowed)
        if name not in met
    ]
    return tuple(found)
