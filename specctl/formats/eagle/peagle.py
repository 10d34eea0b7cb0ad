"""P-EAGLE: an EAGLE-3 draft that drafts all its tokens in one forward.

Slots after the first see a mask token and `mask_hidden` in place of captured states. `mask_hidden`
is [1, A*Ht] in native files and [1, 1, A*Ht] in Speculators and SpecForge files; the stored rank is
kept. A native file names the mask token `ptd_token_id`, `pard_token` or `mask_token_id`.
*Source:* vLLM pull requests 32887 and 43132; Speculators 0.9 `PEagleDraftModel`; SpecForge
`PEagleDraftModel`; NeMo Automodel pull request 2376.
"""

from __future__ import annotations

from specctl.checkpoint import Checkpoint
from specctl.contract.file_names import CONFIG
from specctl.draft import DraftCheckpoint, parallel_geometry
from specctl.formats.assemble import BlockFacts
from specctl.formats.aux_layers import AUX_KEY, read_boundary_ids
from specctl.formats.eagle.eagle3 import (
    NEMO_NAMES,
    SPECULATORS_NAMES,
    Dialect,
    read_eagle3,
    read_norm_flags,
)
from specctl.formats.eagle.flat import (
    flat_norm_before_residual,
    note_switches,
    read_aux,
)
from specctl.formats.eagle.roles import peagle_roles
from specctl.formats.fields import Fields, ReaderFindings, root_fields
from specctl.formats.model_types import flat_layers
from specctl.formats.names import Name, NameTable
from specctl.formats.speculators import layer_fields, read_token_count, report_gamma_missing

MASK_KEY = "mask_hidden"
MASK_TOKEN_KEYS = ("ptd_token_id", "pard_token", "mask_token_id")
_MASK_NAME = Name(role="mask_hidden", keys=(MASK_KEY, f"model.{MASK_KEY}"))


def _with_mask(names: NameTable) -> NameTable:
    return NameTable(names=(_MASK_NAME, *names.names), ignored=names.ignored)


NAMES = _with_mask(SPECULATORS_NAMES)
WRAPPED_NAMES = _with_mask(NEMO_NAMES)


def read_speculators(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft of a Speculators peagle file; every defect is in its diagnostics."""
    root = root_fields(checkpoint.config, ReaderFindings())
    layers, family = layer_fields(root, absent_model_type="qwen3")
    tokens = read_token_count(root, "peagle")
    path = "draft.has_norm_before_residual"
    before_residual = root.flag("norm_before_residual", path)
    if before_residual is None:
        root.findings.derived(
            path, root.where("norm_before_residual"), "Speculators and vLLM take false for peagle"
        )
    return read_eagle3(
        checkpoint,
        _dialect("speculators-peagle", NAMES, checkpoint),
        root=root,
        layers=layers,
        family=family,
        aux=read_boundary_ids(root, AUX_KEY, has_default=True),
        num_speculative_tokens=tokens,
        flags=read_norm_flags(root, has_norm_before_residual=bool(before_residual)),
        block=BlockFacts(mask_token_id=_mask_token(root, ("mask_token_id",))),
        geometry=None if tokens is None else parallel_geometry(tokens),
    )


def read_native(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft of a flat config; every defect is in its diagnostics."""
    root = root_fields(checkpoint.config, ReaderFindings())
    layers, family = flat_layers(root, absent_model_type="llama")
    nested = root.section("eagle_config")
    note_switches(root, nested)
    root.flag("parallel_drafting")
    tokens = root.integer("num_depths", "geometry.num_speculative_tokens")
    if tokens is None:
        report_gamma_missing(root, CONFIG)
    before_residual = flat_norm_before_residual(root, nested)
    is_wrapped = "model.fc.weight" in checkpoint.tensors
    return read_eagle3(
        checkpoint,
        _dialect("peagle", WRAPPED_NAMES if is_wrapped else NAMES, checkpoint),
        root=root,
        layers=layers,
        family=family,
        aux=read_aux(root, nested),
        num_speculative_tokens=tokens,
        flags=read_norm_flags(root, has_norm_before_residual=before_residual, nested=nested),
        block=BlockFacts(mask_token_id=_mask_token(root, MASK_TOKEN_KEYS)),
        geometry=None if tokens is None else parallel_geometry(tokens),
        details={"eagle_config": dict(nested.data)} if nested is not None else {},
    )


def _dialect(format: str, names: NameTable, checkpoint: Checkpoint) -> Dialect:
    stored = checkpoint.tensors.get(MASK_KEY) or checkpoint.tensors.get(f"model.{MASK_KEY}")
    rank = 2 if stored is not None and len(stored.shape) == 2 else 3
    return Dialect(
        format=format,
        names=names,
        roles=peagle_roles(rank),
        algorithm="peagle",
        is_library=format == "speculators-peagle",
    )


def _mask_token(root: Fields, keys: tuple[str, ...]) -> int | None:
    """Return the mask token; SD314 without one, SD208 when two keys name different ones."""
    path = "draft.mask_token_id"
    stated = [key for key in keys if root.has(key)]
    if not stated:
        root.findings.add(
            "SD314",
            where=root.where(keys[0]),
            message=f"no `{'` or `'.join(keys)}`: the slots after the first have no token to embed",
            expected="the id of the mask token used in training",
            found="nothing",
        )
        return None
    token = root.integer(stated[0], path, minimum=0)
    for key in stated[1:]:
        if root.integer(key, minimum=0) != token:
            root.findings.add(
                "SD208",
                where=root.where(key),
                message=f"`{key}` and `{stated[0]}` name different mask tokens",
                expected=token,
                found=root.raw(key),
            )
    return token
