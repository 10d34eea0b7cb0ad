"""What a conversion gives up, and whether the user allowed it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from specctl.checkpoint import tensor_place
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.file_names import CONFIG
from specctl.draft import DraftCheckpoint
from specctl.formats.written import LOSSES, Written, loss_of, lost

_SHOWN = 5
_COUNT_FIELDS = frozenset({"speculators_config", "num_depths"})


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


def hints_lost(
    draft: DraftCheckpoint, config: Mapping[str, object], *, target_name: str | None
) -> Iterator[Diagnostic]:
    """Yield as infos what the source says of serving it and the written config does not.

    The draft computes the same without them: an engine takes both from its command line.

    Args:
        draft: as read.
        config: as written.
        target_name: what is to be recorded as the target.
    """
    count = draft.declared_num_speculative_tokens
    if count is not None and not draft.is_block and not _COUNT_FIELDS & config.keys():
        yield _hint(
            "token-count",
            where=f"{CONFIG}#/speculators_config/proposal_methods",
            message=f"the source says {count} draft tokens",
            found=count,
        )
    if draft.target_name is not None and not _is_said(target_name, config):
        yield _hint(
            "target-name",
            where=f"{CONFIG}#/speculators_config/verifier/name_or_path",
            message=f"the source names `{draft.target_name}`",
            found=draft.target_name,
        )


def maps_left_out(draft: DraftCheckpoint, written: Written) -> Iterator[Diagnostic]:
    """Yield as infos the stored `d2t` and `t2d` that are not written, unless the writer says so.

    The draft computes the same without them: a mask marks the ids that the map names, and neither
    says anything of a draft with the target's vocabulary.

    Args:
        draft: as it is written.
        written: what the dialect's writer returned.
    """
    names = {key.rpartition(".")[2] for key in written.tensors}
    if "t2d" in losses_in(written.diagnostics):
        return
    for role in ("d2t", "t2d") if draft.map_kind == "identity" else ("t2d",):
        ref = draft.tensors.get(role)
        if ref is None or role in names:
            continue
        why = LOSSES["t2d"]
        if draft.map_kind == "identity":
            why = "it is left out, as every target id stands for itself"
        yield diagnose(
            "SD601",
            where=tensor_place(ref),
            message=f"`{ref.key}` has no place in this dialect: {why}",
            found=ref.key,
            help="Nothing to do here; the draft computes the same without it",
            severity="info",
        )


def _hint(name: str, *, where: str, message: str, found: object) -> Diagnostic:
    finding = lost(name, where=where, message=message, found=found)
    help = "Nothing to do here; give it to the engine"
    return msgspec.structs.replace(finding, severity="info", help=help)


def _is_said(name: object, value: object) -> bool:
    if isinstance(value, Mapping):
        return any(_is_said(name, item) for item in value.values())
    return value == name


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
    found = [_accepted(d) if loss_of(d) in allowed else d for d in diagnostics]
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


def _accepted(loss: Diagnostic) -> Diagnostic:
    help = f"Nothing to do: `--allow {loss_of(loss)}` accepts this loss"
    return msgspec.structs.replace(loss, severity="info", help=help)
