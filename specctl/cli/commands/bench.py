"""`specctl bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.checkpoint import write_text_atomic
from specctl.cli import output
from specctl.cli.shared_options import (
    Device,
    Dtype,
    DynamicRank,
    DynamicRows,
    ForceAnchorLayout,
    Graphs,
    Json,
    NumSpeculativeTokens,
    Proposer,
    Seed,
    Temperature,
    Verification,
)

if TYPE_CHECKING:
    from runtime.main import BenchReport, Identical


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
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Use the first so many prompts.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="New tokens for each prompt at most.")
    ] = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Requests that run at once.")
    ] = 1,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Runs of each arm: A B, B A, A B, ...")
    ] = 1,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Run every answer to --max-tokens.")
    ] = False,
    num_speculative_tokens: NumSpeculativeTokens = None,
    proposer: Proposer = None,
    device: Device = None,
    dtype: Dtype = None,
    graphs: Graphs = None,
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
        typer.Option("--output", "-o", metavar="FILE", help="Write the JSON to a file as well."),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of --json and stop.")
    ] = False,
) -> None:
    """Compare decoding with and without the draft on a prompt file.

    Reports speed, accept length and whether both give the same tokens; exit 1 if they do not.
    """
    from runtime import main
    from specctl.ops.hub_manifest import local_manifest

    if schema:
        output.answer_json(main.bench_json_schema())
        return
    if manifest is None or prompts is None:
        missing = "MANIFEST" if manifest is None else "--prompts"
        raise typer.BadParameter("it is needed", param_hint=missing)
    if out is not None and not out.parent.is_dir():
        raise typer.BadParameter(f"there is no directory `{out.parent}`", param_hint="--output")
    settings = main.BenchSettings(
        prompts=prompts,
        prompt_set=prompt_set,
        limit=limit,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        concurrency=concurrency,
        repeats=repeats,
        reference=reference,
        reference_set=reference_set,
        ignore_eos=ignore_eos,
    )
    engine = main.EngineOptions(
        device=device,
        dtype=dtype,
        graphs=None if graphs is None else graphs.value,
        verification=None if verification is None else verification.value,
        dynamic_rows=dynamic_rows,
        dynamic_rank=dynamic_rank,
        force_anchor_layout=None if force_anchor_layout is None else force_anchor_layout.value,
        proposer=proposer,
        num_speculative_tokens=num_speculative_tokens,
    )
    with local_manifest(manifest) as local, output.bar("loading") as on_progress:
        report = main.bench(
            local.path, engine, settings, on_progress=on_progress, on_diagnostic=output.talk_problem
        )
    _write(report, json=json, out=out)
    if report.identical is not None and report.identical.equal != report.identical.total:
        raise typer.Exit(1)


def _write(report: BenchReport, *, json: bool, out: Path | None) -> None:
    if json:
        output.answer_json(report)
    else:
        output.answer(report_text(report))
    if out is not None:
        with output.writing(out):
            write_text_atomic(out, output.json_text(report) + "\n")
        output.talk(f"wrote {out}")


def report_text(report: BenchReport) -> str:
    """Return the report as a table and the lines that qualify it."""
    settings = report.settings
    title = (
        f"{settings.num_prompts} prompts of {settings.prompts}, at most {settings.max_tokens} new "
        f"tokens, concurrency {settings.concurrency}, temperature {settings.temperature:g}, "
        f"{settings.device} {settings.dtype}"
    )
    lines = [title, "", _table(report), ""]
    if report.accept_length is not None:
        rates = " ".join(f"{rate:.3f}" for rate in report.acceptance_per_position)
        lines.append(f"accept length {report.accept_length:.3f}; accepted at position: {rates}")
    if report.identical is not None:
        lines.append(_identical_line(report.identical, report.speedup))
    lines += _reference_lines(report)
    return "\n".join(lines)


def _table(report: BenchReport) -> str:
    from io import StringIO

    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("arm")
    for name in ("tokens", "seconds", "tokens/s", "range", "rounds", "accept length"):
        table.add_column(name, justify="right")
    for arm in report.arms:
        speeds = [run.tokens_per_s for run in arm.runs]
        table.add_row(
            f"{arm.name} ({arm.proposer})" if arm.proposer != "none" else arm.name,
            str(arm.tokens),
            f"{arm.seconds:.2f}",
            f"{arm.tokens_per_s:.1f}",
            f"{min(speeds):.1f}-{max(speeds):.1f}" if len(speeds) > 1 else "one run",
            str(arm.rounds),
            "-" if arm.accept_length is None else f"{arm.accept_length:.3f}",
        )
    console = Console(file=StringIO(), width=100)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())


def _identical_line(identical: Identical, speedup: float | None) -> str:
    line = f"identical to target-only: {identical.equal}/{identical.total}"
    first = identical.first_divergence
    if first is not None:
        return (
            f"{line}; first difference: prompt {first.prompt}, token {first.position}, "
            f"{first.target_only_id} against {first.speculative_id}"
        )
    return line if speedup is None else f"{line}; speedup {speedup:.2f}"


def _reference_lines(report: BenchReport) -> list[str]:
    reference = report.reference
    if reference is None:
        return []
    return [
        f"equal to {reference.file}: {reference.equal}/{reference.total}",
        *(
            f"  prompt {item.prompt}, token {item.position}: {item.found_id}, reference "
            f"{item.reference_id}; the target's two likeliest there are {item.top1_id} and "
            f"{item.top2_id}, {item.margin:.3g} apart"
            for item in reference.differences
        ),
    ]
