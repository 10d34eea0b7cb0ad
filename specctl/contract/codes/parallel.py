"""Family 8, SD850-SD859: pipeline and tensor parallelism."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = (
    Code(
        code="SD850",
        slug="more-stages-than-layers",
        severity="error",
        summary="A pipeline has more stages than the target has layers.",
        why="A stage without a layer would only pass states on: it adds a hand-off and no work.",
        fix="Lower `--pp`",
    ),
    Code(
        code="SD851",
        slug="stage-layers-do-not-add-up",
        severity="error",
        summary="The given layers of the stages are not a split of the target's layers.",
        why=(
            "A layer on no stage would be left out of every forward, one on two would run twice; "
            "either gives other tokens and no error."
        ),
        fix="Give one count for each stage; they add up to the target's layers",
    ),
    Code(
        code="SD852",
        slug="ranks-do-not-divide",
        severity="error",
        summary="A dimension does not divide by the tensor-parallel ranks.",
        why=(
            "Heads are the unit of attention: a rank with part of a head would need the rest of it "
            "at every step. Vocabularies are padded; heads and intermediate sizes cannot be."
        ),
        fix="Choose a `--tp` from the manifest's `parallel.tensor_parallel_sizes`",
    ),
    Code(
        code="SD853",
        slug="stage-message-unknown",
        severity="error",
        summary="A pipeline stage received numbers that are no message of its version.",
        why=(
            "Two stages that disagree on a width would wait for each other until a watchdog ends "
            "both, minutes later; every message states its widths first, so it is known at once."
        ),
        fix="Start every stage from the same version, manifest and command line",
    ),
    Code(
        code="SD854",
        slug="stage-out-of-step",
        severity="error",
        summary="A pipeline stage stands at another position of a request than the last stage.",
        why=(
            "A stage that counts a rejected draft as computed attends to keys of tokens that were "
            "never committed: the text drifts from then on, and nothing fails."
        ),
        fix="Report it with the log of every stage: it is a defect of the runtime",
    ),
    Code(
        code="SD855",
        slug="stage-lost",
        severity="error",
        summary="A neighbouring pipeline stage is gone, or silent beyond the time limit.",
        why="Requests in flight lost part of their KV with that stage; waiting brings none back.",
        fix="Look into that stage's log, then start all stages again",
    ),
)
