"""The cost table of an engine: read from its file where it fits, else measured now and saved.

An engine that chooses draft counts never runs without one: a table for something else is refused
(SD837), and a flat one does not exist.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from runtime.config import RuntimeConfig, dtype_name
from runtime.config.cost_table import (
    DEFAULT_SUFFIX,
    CostTable,
    MeasuredOn,
    bin_end,
    load_costs,
    save_costs,
)
from runtime.config.round_sizes import RoundMenu, RoundSize
from runtime.engine.device_rounds import DeviceRounds, round_menu
from runtime.engine.eager_timing import EagerTimer
from runtime.graphs.timing import DeviceRoundTimer
from runtime.kernels.gemm_table import gemm_table_digest
from runtime.kv import KVLayer
from runtime.models import TargetModel
from runtime.spec.types import Proposer
from specctl.contract.codec import resolve_source
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

logger = logging.getLogger(__name__)

NUM_TIMINGS = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class CostPlace:
    """Where the table of a served manifest is kept.

    Args:
        path: its file, which need not exist.
        fingerprint: of the manifest.
    """

    path: Path
    fingerprint: str


class RoundTimer(Protocol):
    """Times rounds of a size on an engine's own models and caches."""

    def draft_s(self, size: RoundSize) -> float:
        """Return the median seconds of the draft phase."""

    def verify_s(self, size: RoundSize) -> float:
        """Return the median seconds of everything else."""


def cost_path(manifest_path: Path, cost_table: str | None) -> Path:
    """Return the file of a manifest's table: the one that is named, else next to the manifest."""
    if cost_table is not None:
        return resolve_source(cost_table, manifest_path.parent)
    return manifest_path.with_name(manifest_path.stem + DEFAULT_SUFFIX)


def measured_on(config: RuntimeConfig, fingerprint: str, *, is_captured: bool) -> MeasuredOn:
    """Return what a table measured now depends on."""
    return MeasuredOn(
        fingerprint=fingerprint,
        device=_device_name(config.device),
        dtype=dtype_name(config.dtype),
        kernel_table=gemm_table_digest(),
        proposer=config.proposer,
        rounds="graphs" if is_captured else "eager",
    )


def measure_costs(
    timer: RoundTimer, menu: RoundMenu, what: MeasuredOn, known: CostTable | None = None
) -> CostTable:
    """Time every batch with every draft count, and with every bin of rows that is on the menu.

    The draft phase and the rest are timed apart, so one entry of rows serves every draft count.

    Args:
        timer: times one size.
        menu: the sizes.
        what: what they are measured on.
        known: entries that need no measuring, and stay.
    """
    draft_s = {} if known is None else dict(known.draft_s)
    verify_s = {} if known is None else dict(known.verify_s)
    for batch in menu.batches:
        for size in menu.sizes(batch):
            draft, verify = (size.batch, size.num_drafts), (size.batch, bin_end(size.num_rows))
            if size.num_drafts and draft not in draft_s:
                draft_s[draft] = timer.draft_s(size)
            if verify not in verify_s:
                verify_s[verify] = timer.verify_s(size)
    return CostTable(measured_on=what, draft_s=draft_s, verify_s=verify_s, num_timings=NUM_TIMINGS)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedParts:
    """What is timed.

    Args:
        rounds: None where rounds run eagerly.
    """

    target: TargetModel
    target_kv: Sequence[KVLayer]
    proposer: Proposer
    rounds: DeviceRounds | None


def engine_costs(
    parts: TimedParts,
    config: RuntimeConfig,
    place: CostPlace | None,
    *,
    on_diagnostic: Callable[[Diagnostic], None] | None,
) -> CostTable:
    """Return the table of an engine that is about to be made; see `settle_costs`.

    Raises:
        DiagnosticError: SD836, SD837.
    """
    rounds, menu = parts.rounds, round_menu(config)
    is_captured = rounds is not None and rounds.report.num_graphs > 0
    fingerprint = "" if place is None else place.fingerprint
    what = measured_on(config, fingerprint, is_captured=is_captured)

    def measure(known: CostTable | None) -> CostTable:
        if rounds is not None:
            timer = DeviceRoundTimer(
                rounds.round_, context=rounds.runner.contexts[0], num_timings=NUM_TIMINGS
            )
            return measure_costs(timer, menu, what, known)
        eager = EagerTimer(
            parts.target, parts.target_kv, parts.proposer, config, num_timings=NUM_TIMINGS
        )
        table = measure_costs(eager, menu, what, known)
        eager.close()
        return table

    return settle_costs(place, what, menu, measure, on_diagnostic=on_diagnostic)


def settle_costs(
    place: CostPlace | None,
    what: MeasuredOn,
    menu: RoundMenu,
    measure: Callable[[CostTable | None], CostTable],
    *,
    on_diagnostic: Callable[[Diagnostic], None] | None,
) -> CostTable:
    """Return the table to choose by.

    Args:
        place: where it is kept.
        what: what a table must have been measured on.
        menu: sizes that it must have.
        measure: makes one, from one that lacks sizes or from none.
        on_diagnostic: gets SD838 (it cannot be saved) and SD839 (it was measured now), if given.

    Raises:
        DiagnosticError: SD836 (there is no place for one), SD837 (the file does not fit).
    """
    if place is None:
        raise DiagnosticError(
            diagnose(
                "SD836",
                where="--cost-table",
                message="draft counts are to be chosen, and no cost table says what they cost",
                expected="a cost table",
                found="none",
            )
        )
    known = load_costs(place.path, what)
    sizes = [size for batch in menu.batches for size in menu.sizes(batch)]
    if known is not None and all(known.has(size) for size in sizes):
        return known
    logger.info("measuring what rounds cost")
    table = measure(known)
    found = [
        diagnose(
            "SD839",
            where=str(place.path),
            message=f"{_count(table) - _count(known)} costs were measured",
        )
    ]
    try:
        save_costs(table, place.path)
    except DiagnosticError as error:
        found += error.diagnostics
    if on_diagnostic is not None:
        for problem in found:
            on_diagnostic(problem)
    return table


def _count(table: CostTable | None) -> int:
    return 0 if table is None else len(table.draft_s) + len(table.verify_s)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"
