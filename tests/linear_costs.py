"""Cost tables from a formula, so that choices of draft counts can be foreseen."""

from __future__ import annotations

from runtime.config.cost_table import CostTable, MeasuredOn, bin_end
from runtime.config.round_sizes import RoundMenu

NOWHERE = MeasuredOn(
    fingerprint="sha256:0",
    device="none",
    dtype="float32",
    kernel_table="none",
    proposer="oracle",
    rounds="eager",
)


def linear_costs(
    menu: RoundMenu, *, step_s: float = 1.0, draft_s: float = 0.1, row_s: float = 0.0
) -> CostTable:
    """Return costs of step_s + draft_s for each draft step + row_s for each row of a bin."""
    sizes = [size for batch in menu.batches for size in menu.sizes(batch)]
    return CostTable(
        measured_on=NOWHERE,
        draft_s={(s.batch, s.num_drafts): draft_s * s.num_drafts for s in sizes if s.num_drafts},
        verify_s={
            (s.batch, bin_end(s.num_rows)): step_s + row_s * bin_end(s.num_rows) for s in sizes
        },
        num_timings=1,
    )
