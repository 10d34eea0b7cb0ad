"""Family 8, SD801, SD850-SD859 and SD875-SD879: pipeline and tensor parallelism."""

from __future__ import annotations

from specctl.contract.codes.table import Code

CODES: tuple[Code, ...] = (
    Code(
        code="SD801",
        slug="stage-has-no-draft-embedding",
        severity="error",
        summary="The draft has no input embedding on its pipeline stage.",
        why=(
            "The draft runs on the last stage and the target's embedding lives on the first. "
            "Without rows of its own or of the target's files a draft would read uninitialised "
            "memory: it runs, and no proposal is ever right."
        ),
        fix="Emit the manifest again from the target's and the draft's checkpoints",
    ),
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
        fix=(
            "Choose a `--tp` that divides each of them; `--draft-tp 1` keeps a draft whole whose "
            "numbers do not divide"
        ),
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
    Code(
        code="SD856",
        slug="stage-failed",
        severity="error",
        summary="A pipeline stage met a fault of its own while it ran its layers.",
        why=(
            "The stage's KV is no longer that of the other stages, so no request could go on; the "
            "stage ends and the server answers every request with this code."
        ),
        fix="Look into that stage's log, then start all stages again",
    ),
    Code(
        code="SD857",
        slug="load-format-refused",
        severity="error",
        summary="Weights cannot be read in the load format that was asked for.",
        why=(
            "A draft on a stage without the target's embedding reads that tensor from the target's "
            "files a second time. A stream cannot be read twice, and a format that this version "
            "does not know may store other numbers under the same name."
        ),
        fix="Use `--load-format auto`, `safetensors` or `dummy`",
    ),
    Code(
        code="SD858",
        slug="draft-embedding-ambiguous",
        severity="error",
        summary="More than one tensor could be the draft's input embedding.",
        why=(
            "The draft looks up every token it reads in that matrix. With the wrong one it runs, "
            "and every proposal is noise: accept length sinks toward 1 and nothing fails."
        ),
        fix="Keep one of the tensors in the draft's files, or emit the manifest again",
    ),
    Code(
        code="SD875",
        slug="gpu-memory-not-shared",
        severity="warning",
        summary="Two stages share a GPU, and one process cannot map the memory of the other.",
        why=(
            "States then travel through host memory: two copies and a wait for the device at every "
            "step. Output is the same; each step takes longer. Containers that do not share IPC "
            "and process namespaces are the usual reason."
        ),
        fix="Run both stages in one container or with shared namespaces, or in one process",
    ),
)
