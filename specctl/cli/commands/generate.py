"""`specctl generate`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.cli import output
from specctl.cli.shared_options import (
    BatchBuckets,
    CostTable,
    Device,
    DraftTensorParallel,
    Dtype,
    DynamicRank,
    DynamicRows,
    ForceAnchorLayout,
    Graphs,
    LengthModeOption,
    LoadFormat,
    MaxNgram,
    MinP,
    NumSpeculativeTokens,
    PipelineParallel,
    PrefillBuckets,
    Proposer,
    RankTimeout,
    Seed,
    StageLayers,
    StagesInProcess,
    Temperature,
    TensorParallel,
    TopK,
    TopP,
    Verification,
    check_filters,
    optional_integers,
    parse_draft_counts,
    value_of,
)

if TYPE_CHECKING:
    from runtime.main import EngineOptions, GenerateOptions, GenerateReport


def generate(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="Manifest to run.")],
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The prompt; `-` reads it from stdin.")
    ],
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Send a chat message, or the text as it is; default: chat if there is a template.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="New tokens at most.")
    ] = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    num_speculative_tokens: NumSpeculativeTokens = None,
    length_mode: LengthModeOption = None,
    cost_table: CostTable = None,
    proposer: Proposer = None,
    max_ngram: MaxNgram = None,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Use the target alone.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Answer again without a draft; exit 1 if they differ, except where rejection "
            "mode draws.",
        ),
    ] = False,
    pipeline_parallel: PipelineParallel = None,
    tensor_parallel: TensorParallel = None,
    draft_tensor_parallel: DraftTensorParallel = None,
    stage_layers: StageLayers = None,
    stages_in_process: StagesInProcess = None,
    rank_timeout_s: RankTimeout = None,
    load_format: LoadFormat = None,
    device: Device = None,
    dtype: Dtype = None,
    graphs: Graphs = None,
    batch_buckets: BatchBuckets = None,
    prefill_buckets: PrefillBuckets = None,
    verification: Verification = None,
    dynamic_rows: DynamicRows = None,
    dynamic_rank: DynamicRank = None,
    force_anchor_layout: ForceAnchorLayout = None,
) -> None:
    """Answer one prompt: the text goes to stdout as it comes, the figures to stderr."""
    from runtime import main

    drafts = parse_draft_counts(num_speculative_tokens, length_mode)
    check_filters(temperature, top_k, top_p, min_p)
    if no_speculation and (
        compare or proposer is not None or drafts.num_speculative_tokens or drafts.length_mode
    ):
        raise typer.BadParameter(
            "it leaves nothing for --compare, --proposer or --num-speculative-tokens to do",
            param_hint="--no-speculation",
        )
    engine = main.EngineOptions(
        pipeline_parallel=pipeline_parallel,
        tensor_parallel=tensor_parallel,
        draft_tensor_parallel=draft_tensor_parallel,
        stage_layers=optional_integers(stage_layers, "--stage-layers"),
        stages_in_process=stages_in_process,
        rank_timeout_s=rank_timeout_s,
        load_format=load_format,
        device=device,
        dtype=dtype,
        graphs=value_of(graphs),
        batch_buckets=optional_integers(batch_buckets, "--batch-buckets"),
        prefill_buckets=optional_integers(prefill_buckets, "--prefill-buckets"),
        verification=value_of(verification),
        dynamic_rows=dynamic_rows,
        dynamic_rank=dynamic_rank,
        force_anchor_layout=value_of(force_anchor_layout),
        proposer="none" if no_speculation else proposer,
        max_ngram=max_ngram,
        num_speculative_tokens=drafts.num_speculative_tokens,
        length_mode=drafts.length_mode,
        cost_table=cost_table,
    )
    options = main.GenerateOptions(
        prompt=sys.stdin.read() if prompt == "-" else prompt,
        is_chat=chat,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        has_comparison=compare,
    )
    report = _answered(manifest, engine, options)
    output.answer("")
    output.talk("\n".join(summary(report)))
    if report.claims_equality and report.first_divergence is not None:
        raise typer.Exit(1)


def _answered(manifest: Path, engine: EngineOptions, options: GenerateOptions) -> GenerateReport:
    """Write the answer as it comes; return its figures."""
    from runtime import main
    from specctl.ops.hub_manifest import local_manifest

    with ExitStack() as stack:
        local = stack.enter_context(local_manifest(manifest))
        loading = stack.enter_context(ExitStack())
        loading.enter_context(output.bar("loading"))

        def show_text(text: str) -> None:
            loading.close()  # the bar makes room for the answer
            output.answer_part(text)

        return main.generate(
            local.path, engine, options, on_text=show_text, on_diagnostic=output.talk_problem
        )


def summary(report: GenerateReport) -> list[str]:
    """Return the lines that follow the answer."""
    speed, plain = report.speed, report.comparison
    lines = [f"tokens:          {speed.tokens} ({report.finish_reason})"]
    if report.accept_length is not None and report.proposer != "none":
        lines.append(
            f"accept length:   {report.accept_length:.3f} ({report.proposer}, "
            f"{report.num_speculative_tokens} drafts a round, {report.rounds} rounds)"
        )
    if plain is None:
        return [*lines, f"tokens/s:        {speed.tokens_per_s:.1f}"]
    is_identical = report.first_divergence is None
    place = "" if is_identical else f" (first difference at output token {report.first_divergence})"
    both = f"{speed.tokens_per_s:.1f} with speculation, {plain.tokens_per_s:.1f} without"
    answer = f"{'yes' if is_identical else 'no'}{place}"
    if not report.claims_equality:
        answer += "; not claimed: rejection mode keeps the distribution of sampled answers"
    return [*lines, f"tokens/s:        {both}", f"identical: {answer}"]
