"""Proposers by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.config import DRAFT_PROPOSERS, ProposerName
from runtime.kv import KVLayer
from runtime.models import BlockModel, DraftModel, MtpModel, PEagleModel
from runtime.spec.blend import BlendedProposer
from runtime.spec.block import BlockProposer
from runtime.spec.chain import ChainProposer
from runtime.spec.dynamic_rows import DynamicRows, DynamicRowSettings
from runtime.spec.mtp import LayeredMtpProposer
from runtime.spec.ngram import DEFAULT_MAX_NGRAM, DeviceNgramProposer, NgramProposer
from runtime.spec.none import NoProposer
from runtime.spec.oracle import DeviceOracleProposer, OracleProposer, OracleScript
from runtime.spec.parallel import ParallelProposer
from runtime.spec.script_table import Room
from runtime.spec.types import DeviceProposer, Proposer
from specctl.contract.diagnostics import DiagnosticError, diagnose


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftParts:
    """What a proposer with a draft model runs on.

    Args:
        model: the draft.
        kv: the draft's layers of the KV pool.
        kv_block_size: tokens of a KV block.
        num_slots: requests that may run at once.
        dynamic_rows: None where only ids of the draft's map are proposed.
    """

    model: DraftModel
    kv: Sequence[KVLayer]
    kv_block_size: int
    num_slots: int
    dynamic_rows: DynamicRowSettings | None = None


def make_proposer(
    name: ProposerName,
    *,
    device: torch.device,
    draft: DraftParts | None = None,
    script: OracleScript | None = None,
    max_ngram: int = DEFAULT_MAX_NGRAM,
    room: Room | None = None,
) -> Proposer:
    """Make the proposer called `name`.

    Args:
        name: which one.
        device: where proposals are made.
        draft: for the proposers that run one.
        script: for `oracle`; a draft beside a script has its ids replaced as that says.
        max_ngram: for `ngram`: longest suffix looked up.
        room: of what a script or lookup needs in rounds on the device; None: they run on the host.

    Raises:
        DiagnosticError: SD807, the named proposer lacks its parts.
    """
    if name in DRAFT_PROPOSERS:
        if draft is None:
            raise _unavailable(name, expected=f"an `{name}` draft in the manifest")
        proposer = _draft_proposer(draft)
        if script is None:
            return proposer
        assert room is not None, "ids of a draft are replaced on the device"
        return BlendedProposer(proposer, script, room, device=device)
    if name == "oracle":
        if script is None:
            raise _unavailable(name, expected="a script to replay")
        if room is None or script.rounds:
            return OracleProposer(script, device=device)
        return DeviceOracleProposer(script, room, device=device)
    if name == "ngram":
        if room is None:
            return NgramProposer(device=device, max_ngram=max_ngram)
        return DeviceNgramProposer(room, device=device, max_ngram=max_ngram)
    return NoProposer(device=device)


def _draft_proposer(draft: DraftParts) -> DeviceProposer:
    """Return the proposer of a kind of model."""
    model, kv = draft.model, draft.kv
    kv_block_size, num_slots = draft.kv_block_size, draft.num_slots
    if isinstance(model, BlockModel):
        return BlockProposer(model, kv, kv_block_size=kv_block_size, num_slots=num_slots)
    if isinstance(model, PEagleModel):
        return ParallelProposer(model, kv, kv_block_size=kv_block_size, num_slots=num_slots)
    if isinstance(model, MtpModel) and len(model.layers) > 1:
        return LayeredMtpProposer(model, kv, kv_block_size=kv_block_size, num_slots=num_slots)
    settings, rows = draft.dynamic_rows, None
    if settings is not None:
        rows = DynamicRows(model, settings, num_slots=num_slots)
    return ChainProposer(
        model, kv, kv_block_size=kv_block_size, num_slots=num_slots, dynamic_rows=rows
    )


def _unavailable(name: str, *, expected: str) -> DiagnosticError:
    """Return SD807 for a proposer without its parts."""
    return DiagnosticError(
        diagnose(
            "SD807",
            where="--proposer",
            message=f"proposer `{name}` has nothing to run on",
            expected=expected,
            found="none",
        )
    )
