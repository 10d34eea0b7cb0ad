"""Proposers by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from runtime.kv import KVLayer
from runtime.models import Eagle3Model
from runtime.spec.eagle3 import Eagle3Proposer
from runtime.spec.ngram import DEFAULT_MAX_NGRAM, NgramProposer
from runtime.spec.none import NoProposer
from runtime.spec.oracle import OracleProposer, OracleScript
from runtime.spec.types import Proposer
from specctl.contract.diagnostics import DiagnosticError, diagnose

ProposerName = Literal["none", "eagle3", "ngram", "oracle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Parts:
    """What an EAGLE-3 proposer runs on.

    Args:
        model: the draft.
        kv: the draft's layers of the KV pool.
        kv_block_size: tokens of a KV block.
        num_slots: requests that may run at once.
    """

    model: Eagle3Model
    kv: Sequence[KVLayer]
    kv_block_size: int
    num_slots: int


def make_proposer(
    name: ProposerName,
    *,
    device: torch.device,
    eagle3: Eagle3Parts | None = None,
    script: OracleScript | None = None,
    max_ngram: int = DEFAULT_MAX_NGRAM,
) -> Proposer:
    """Make the proposer called `name`.

    Args:
        name: which one.
        device: where proposals are made.
        eagle3: for `eagle3`.
        script: for `oracle`.
        max_ngram: for `ngram`: longest suffix looked up.

    Raises:
        DiagnosticError: SD807, the named proposer lacks its parts.
    """
    if name == "eagle3":
        if eagle3 is None:
            raise _unavailable(name, expected="an `eagle3` draft in the manifest")
        return Eagle3Proposer(
            eagle3.model,
            eagle3.kv,
            kv_block_size=eagle3.kv_block_size,
            num_slots=eagle3.num_slots,
        )
    if name == "oracle":
        if script is None:
            raise _unavailable(name, expected="a script to replay")
        return OracleProposer(script, device=device)
    if name == "ngram":
        return NgramProposer(device=device, max_ngram=max_ngram)
    return NoProposer(device=device)


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
