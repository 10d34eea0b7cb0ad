"""`specctl bench`."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.cli import output
from specctl.cli.shared_options import (
    BatchBuckets,
    BenchProposer,
    CostTable,
    Device,
    DraftTensorParallel,
    Dtype,
    DynamicRank,
    DynamicRows,
    ForceAnchorLayout,
    Graphs,
    Json,
    LengthModeOption,
    LoadFormat,
    MaxNgram,
    MinP,
    NumSpeculativeTokens,
    PipelineParallel,
    PrefillBuckets,
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
    from runtime.main import BenchReport, BenchSettings, EngineOptions, RawBench


class Turns(str, Enum):
    """Which questions of a conversation are asked."""

    first = "first"
    both = "both"


class Contract(str, Enum):
    """Whether an arm without the exactness contract runs as well."""

    on = "on"
    off = "off"


def bench(
    manifest: Annotated[
        Path | None, typer.Argument(metavar="MANIFEST", help="Manifest to run.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="MT-Bench jsonl, chat jsonl, plain text (a prompt a line) or JSON of token ids.",
        ),
    ] = None,
    prompt_set: Annotated[
        str | None, typer.Option("--set", metavar="KEY", help="Set of a token-id JSON.")
    ] = None,
    turns: Annotated[
        Turns,
        typer.Option("--turns", help="both: the second question, too, after the first answer."),
    ] = Turns.first,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(
            "--prompt-tokens",
            "--context",
            metavar="N,...",
            help="Random prompts of these lengths instead of a file; each is a point.",
        ),
    ] = None,
    shape: Annotated[
        Path | None,
        typer.Option(
            "--shape",
            metavar="CONFIG",
            help="Random weights for a target's config.json instead of a manifest.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Use the first so many prompts.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="New tokens for each prompt at most.")
    ] = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    concurrency: Annotated[
        str,
        typer.Option(
            "--concurrency",
            "--batch",
            metavar="N,...",
            help="Requests that run at once; each number is a point.",
        ),
    ] = "1",
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Runs of each arm: A B, B A, A B, ...")
    ] = 2,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Run every answer to --max-tokens.")
    ] = False,
    accept_length: Annotated[
        float | None,
        typer.Option(
            "--accept-length",
            help="That the drafts of --proposer oracle aim at; default: none is wrong.",
        ),
    ] = None,
    force_accept_length: Annotated[
        float | None,
        typer.Option(
            "--force-accept-length",
            help="Commit drafts by a seeded schedule with this mean instead of verifying them; "
            "times only, the text is worth nothing.",
        ),
    ] = None,
    contract: Annotated[
        Contract,
        typer.Option(
            "--contract",
            help="off: one more arm, whose kernels follow the number of rows; its answers may "
            "differ, its speed says what exactness costs.",
        ),
    ] = Contract.on,
    step_samples: Annotated[
        int | None,
        typer.Option(
            "--step-samples",
            min=0,
            help="Samples of each step's time, default 20; 0 measures none. Stages and ranks that "
            "are processes have none.",
        ),
    ] = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    length_mode: LengthModeOption = None,
    cost_table: CostTable = None,
    proposer: BenchProposer = None,
    max_ngram: MaxNgram = None,
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
    reference: Annotated[
        Path | None,
        typer.Option("--reference", metavar="FILE", help="Reference answers: JSON of token ids."),
    ] = None,
    reference_set: Annotated[
        str | None, typer.Option("--reference-set", metavar="KEY", help="Set of that JSON.")
    ] = None,
    json: Json = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Write raw records, summary and page there."
        ),
    ] = None,
    reanalyze: Annotated[
        Path | None,
        typer.Option(
            "--reanalyze", metavar="DIR", help="Report on the records of a directory; run nothing."
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of --json and stop.")
    ] = False,
) -> None:
    """Compare decoding with and without the draft, and time the steps of a round.

    Reports speed, accept length and whether both give the same tokens; exit 1 if they do not.
    """
    from runtime import main

    if schema:
        output.answer_json(main.bench_json_schema())
        return
    if reanalyze is not None:
        _check_reanalysis(manifest, shape, prompts, prompt_tokens)
        _report(main.read_raw(reanalyze), json=json, out=out or reanalyze, is_new=False)
        return
    _check(manifest, shape, prompts, prompt_tokens)
    check_filters(temperature, top_k, top_p, min_p)
    aim = _accept_length(accept_length, force_accept_length)
    settings = main.BenchSettings(
        prompts=prompts,
        prompt_set=prompt_set,
        prompt_tokens=_numbers(prompt_tokens, "--prompt-tokens"),
        shape=shape,
        limit=limit,
        turns=turns.value,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        concurrency=_numbers(concurrency, "--concurrency"),
        repeats=repeats,
        reference=reference,
        reference_set=reference_set,
        ignore_eos=ignore_eos,
        accept_length=aim,
        is_forced=force_accept_length is not None,
        contract=contract.value,
        step_samples=step_samples,
        command=" ".join(["specctl", *sys.argv[1:]]),
    )
    drafts = parse_draft_counts(num_speculative_tokens, length_mode)
    engine = main.EngineOptions(
        pipeline_parallel=pipeline_parallel,
        stage_layers=optional_integers(stage_layers, "--stage-layers"),
        tensor_parallel=tensor_parallel,
        draft_tensor_parallel=draft_tensor_parallel,
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
        proposer=proposer,
        max_ngram=max_ngram,
        num_speculative_tokens=drafts.num_speculative_tokens,
        length_mode=drafts.length_mode,
        cost_table=cost_table,
    )
    if out is not None:
        _write_records(None, out)  # before anything runs: it may turn out that nothing can be kept
    _report(_run(manifest, engine, settings, out), json=json, out=out, is_new=True)


def _check_reanalysis(*given: object) -> None:
    """Refuse what a run would need: records are read, nothing is run."""
    if any(item is not None for item in given):
        raise typer.BadParameter(
            "it runs nothing: leave model and prompts out", param_hint="--reanalyze"
        )


def _accept_length(oracle: float | None, forced: float | None) -> float | None:
    """Return the one that was given; both are wrong usage."""
    if oracle is not None and forced is not None:
        raise typer.BadParameter(
            "`--accept-length` and `--force-accept-length` exclude each other",
            param_hint="--force-accept-length",
        )
    return oracle if forced is None else forced


def _check(
    manifest: Path | None, shape: Path | None, prompts: Path | None, prompt_tokens: str | None
) -> None:
    """Refuse a benchmark without a model or prompts, or with two of either."""
    if (manifest is None) == (shape is None):
        raise typer.BadParameter("give a manifest or `--shape`, one of them", param_hint="MANIFEST")
    if (prompts is None) == (prompt_tokens is None):
        raise typer.BadParameter(
            "give `--prompts` or `--prompt-tokens`, one of them", param_hint="--prompts"
        )
    if shape is not None and prompts is not None:
        raise typer.BadParameter(
            "random weights take random prompts: use `--prompt-tokens`", param_hint="--prompts"
        )


def _numbers(text: str | None, option: str) -> tuple[int, ...]:
    """Return `1,8,32` as numbers above 0."""
    if text is None:
        return ()
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(
            f"`{text}` is not a list of numbers above 0 such as 1,8,32", param_hint=option
        )
    return numbers


def _run(
    manifest: Path | None, engine: EngineOptions, settings: BenchSettings, out: Path | None
) -> RawBench:
    """Run a benchmark; what was recorded is in `out` whenever a point has ended."""
    from contextlib import ExitStack

    from runtime import main
    from specctl.ops.hub_manifest import local_manifest

    with ExitStack() as stack:
        path = None
        if manifest is not None:
            path = stack.enter_context(local_manifest(manifest)).path
        on_progress = stack.enter_context(output.bar("loading"))
        return main.bench(
            path,
            engine,
            settings,
            on_progress=on_progress,
            on_diagnostic=output.talk_problem,
            on_point=lambda raw: None if out is None else _write_records(raw, out),
        )


def _report(raw: RawBench, *, json: bool, out: Path | None, is_new: bool) -> None:
    """Print the report of raw records, write it to a directory, and exit 1 on a difference."""
    from runtime import main

    report = main.summarise(raw)
    if json:
        output.answer_json(report)
    else:
        from specctl.cli.bench_text import report_text

        output.answer(report_text(report))
    if out is not None:
        _write(raw, report, out, is_new=is_new)
    if not report.is_equal:
        raise typer.Exit(1)


def _write(raw: RawBench, report: BenchReport, out: Path, *, is_new: bool) -> None:
    from runtime import main
    from specctl.checkpoint import write_text_atomic

    if is_new:
        _write_records(raw, out)
    with output.writing(out):
        out.mkdir(parents=True, exist_ok=True)
        write_text_atomic(out / "summary.json", output.json_text(report) + "\n")
        write_text_atomic(out / "report.html", main.report_page(report))
    output.talk(f"wrote {out}")


def _write_records(raw: RawBench | None, out: Path) -> None:
    """Write what was recorded so far, None: nothing, to a directory."""
    from runtime import main

    with output.writing(out):
        out.mkdir(parents=True, exist_ok=True)
        if raw is not None:
            main.write_raw(out, raw)
